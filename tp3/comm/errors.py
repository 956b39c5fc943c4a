"""What goes wrong between ranks. Bad arguments are ValueError; everything here is a RuntimeError.

All derive from ``torch.distributed.DistBackendError``, so that code written for NCCL catches them.
"""

from __future__ import annotations

from torch.distributed import DistBackendError


class R4DError(DistBackendError):
    """The group failed: it is unusable afterwards and says so."""


class CollectiveTimeout(R4DError):
    """A wait outlasted the group's timeout; names the call, its sequence number and the missing
    ranks.
    """


class PeerDied(R4DError):
    """A peer's process is gone."""


class PeerFailed(R4DError):
    """A peer gave up first; carries its reason."""


class Disagreement(R4DError):
    """Ranks made different calls; carries both sides."""
