"""A tiny random Qwen3-VL with the processor of its pictures, to be made where torchvision is."""

from __future__ import annotations

from typing import Any

from tests.vllm.models import DENSE

WORDS = 510  # the tokens after them
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<unk>")
PICTURE = [WORDS + 2, WORDS, WORDS + 3]  # one in a prompt
TEXT = {
    **DENSE,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [4, 6, 6],
        "mrope_interleaved": True,
    },
}
TOWER = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_heads": 4,  # which three ranks do not divide
    "out_hidden_size": 128,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 64,
}
PATCHES = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}


def save(folder: str) -> None:
    """The checkpoint, its tokenizer and its processor."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    marks = dict(zip(("image", "video", "vision_start", "vision_end"), range(WORDS, WORDS + 4)))
    config = Qwen3VLConfig(
        text_config=TEXT,
        vision_config=TOWER,
        tie_word_embeddings=False,
        **{f"{name}_token_id": number for name, number in marks.items()},
    )
    model = Qwen3VLForConditionalGeneration(config).float()
    for parameter in model.parameters():  # so that pictures and words make a difference
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3 * (128 / parameter.shape[-1]) ** 0.5)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)


def processor() -> Any:
    """Words t0 to t509 and the marks; pictures in patches of 16 pixels."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    words = {word: i for i, word in enumerate([*(f"t{i}" for i in range(WORDS)), *MARKS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="t1", eos_token="t2", pad_token="t0",
        additional_special_tokens=list(MARKS[:4]),
    )  # fmt: skip
    tokenizer.image_token, tokenizer.video_token = MARKS[:2]
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**PATCHES, min_pixels=32**2, max_pixels=128**2),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**PATCHES),
        chat_template="none",
    )
