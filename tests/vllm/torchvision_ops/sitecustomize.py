"""On PYTHONPATH where a model imports torchvision, whose wheel is a CUDA build.

Its operators do not load there; that their names exist is enough for it to be imported.
"""

import torch

for name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
