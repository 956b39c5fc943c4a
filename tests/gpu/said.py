"""What a model says in vLLM: ``python -m tests.gpu.said ARGUMENTS.json PROMPTS.json OUT.json``."""

import json
import sys
from pathlib import Path


def main(arguments: str, prompts: str, out: str) -> None:
    """The log-probabilities of each prompt's tokens after its first."""
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(Path(arguments).read_text()))
    asked = [{"prompt_token_ids": each} for each in json.loads(Path(prompts).read_text())]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, detokenize=False)
    told = [
        [step[t].logprob for step, t in zip(each.prompt_logprobs[1:], each.prompt_token_ids[1:])]
        for each in llm.generate(asked, params, use_tqdm=False)
    ]
    Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
