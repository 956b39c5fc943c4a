"""A model that sees, in vLLM: its tower has heads that do not divide by the ranks and runs whole on
each of them, while the language model is padded.
"""

import pytest

from tests.vllm import fleet, seeing
from tests.vllm.test_engine_families import TOLERANCE

PROMPTS = [
    *([1, 5, *seeing.PICTURE, 9, 200] for _ in range(3)),
    [1, 77, 301, *seeing.PICTURE],
    [1, *seeing.PICTURE, 450, 3, 90],
]
OPTIONS = {
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "skip_mm_profiling": True,
    "skip_tokenizer_init": False,
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What it says on one rank and on three, and what the first of the three logs."""
    root = tmp_path_factory.mktemp("seeing")
    code = f"from tests.vllm import seeing; seeing.save({str(root / 'model')!r})"
    fleet.ask(root / "made", {"code": code})
    model = {"model": {"model": str(root / "model"), **OPTIONS}}
    found = [
        fleet.run(root / str(tp), model, tp=tp, prompts=PROMPTS, pictures=True)["model"]
        for tp in (1, 3)
    ]
    return *found, (root / "3" / "rank0.log").read_text()


def test_three_ranks_see_the_same(said):
    stock, padded, log = said
    assert padded["mark"]
    assert "the vision tower (4 heads) runs data-parallel" in log
    apart, worst = fleet.differences(stock, padded)
    assert apart == 0
    assert worst < TOLERANCE


def test_pictures_make_a_difference(said):
    """The first three prompts differ in nothing else."""
    answers = [tuple(answer["tokens"]) for answer in said[0]["answers"][:3]]
    assert len(set(answers)) == 3
