"""Every tensor of the headers against the plan, without weights and without torch."""

import subprocess
import sys

import pytest
import torch

from tests.pad.folders import CONFIG, save, weights
from tp3.pad.check import check
from tp3.pad.headers import read_headers
from tp3.pad.planner import plan

LAYER = "model.layers.1."


def checked(folder, tensors=None, tp=3, **options):
    return check(read_headers(save(folder, tensors, **options)), plan(CONFIG, tp=tp))


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_a_fitting_checkpoint(tmp_path, sharded):
    found = checked(tmp_path, sharded=sharded)
    assert (found.covered, found.untouched, found.errors) == (2 + 3 * 7, 1 + 3 * 2, ())
    assert "self_attn.q_proj.weight 3 × [88 → 96]" in found.lines
    found.require()


def test_a_plan_that_changes_nothing_still_checks(tmp_path):
    found = checked(tmp_path, tp=1)
    assert (found.covered, found.untouched, found.errors) == (0, 30, ())
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight is missing"):
        checked(
            tmp_path, {n: t for n, t in weights().items() if n != "lm_head.weight"}, 1
        ).require()


def test_four_errors_name_four_tensors(tmp_path):
    tensors = weights()
    tensors[LAYER + "self_attn.query_proj.weight"] = tensors.pop(LAYER + "self_attn.q_proj.weight")
    del tensors["model.norm.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(131, 88)
    tensors[LAYER + "mlp.up_proj.weight"] = torch.ones(132, 88)
    found = checked(tmp_path, tensors)
    assert len(found.errors) == 4
    renamed, extra, misshaped, missing = sorted(
        found.errors, key=lambda e: ("query" not in e, "layers.3" not in e, "132" not in e)
    )
    assert "query_proj.weight is not part" in renamed
    assert f"{LAYER}self_attn.q_proj.weight, of the same shape, is missing" in renamed
    assert "tensor model.layers.3.mlp.up_proj.weight is not part" in extra
    assert f"tensor {LAYER}mlp.up_proj.weight has shape [132, 88], expected [131, 88]" in misshaped
    assert missing == "tensor model.norm.weight is missing"
    with pytest.raises(ValueError, match=r"\(and 3 more errors\)"):
        found.require()


def test_a_tensor_of_another_shape_is_not_taken_for_the_missing_one(tmp_path):
    tensors = weights()
    del tensors[LAYER + "self_attn.q_proj.weight"]
    tensors[LAYER + "self_attn.qq_proj.weight"] = torch.ones(5)
    assert len(checked(tmp_path, tensors).errors) == 2


def test_another_models_checkpoint_is_answered_at_once(tmp_path):
    tensors = {f"transformer.h.{n}.attn.weight": torch.ones(1) for n in range(500)}
    assert len(checked(tmp_path, tensors).errors) == 500 + 30


def test_torch_is_not_imported(tmp_path):
    save(tmp_path)
    code = f"""
import sys
from tp3.cli.main import main
try:
    main(["check", {str(tmp_path)!r}, "--tp", "3"])
except SystemExit as stop:
    assert stop.code == 0, stop.code
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "23 tensors are padded, 7 are left alone" in ran.stdout
