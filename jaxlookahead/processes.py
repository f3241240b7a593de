"""The same drafts in every process of a mesh."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.tree import unpack

MODES = (None, "check", "broadcast")


class Processes:
    """What the processes that share a mesh do about their drafts; nothing where there is one process."""

    def __init__(self, mode: str | None, mesh: Mesh | None) -> None:
        """Reads the mesh.

        Args:
          mode: None trusts the drafters to be deterministic; `"check"` compares a digest of the drafts before every
            step; `"broadcast"` takes those of process 0.
          mesh: where the parameters are.

        Raises:
          ValueError: another mode.
        """
        if mode not in MODES:
            raise ValueError(f"processes must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        self.mode = mode
        self.several = mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1
        self.step = 0

    @property
    def timed_alike(self) -> bool:
        """Whether a choice by the clock is the same in all processes."""
        return not self.several or self.mode == "broadcast"

    def agree(self, packed: np.ndarray, drafts: Sequence[Draft], widest: int) -> tuple[np.ndarray, Sequence[Draft]]:
        """What this step verifies: `packed` `[2, B, N]` and its drafts, or those of process 0.

        Args:
          packed: see `tree.pack`.
          drafts: what it holds, for each of the `B` rows.
          widest: the largest `N` of any step.

        Raises:
          RuntimeError: the drafts differ; in every process.
        """
        if not self.several or self.mode is None:
            return packed, drafts
        from jax.experimental import multihost_utils

        self.step += 1
        if self.mode == "check":
            digest = zlib.crc32(packed.tobytes(), packed.shape[-1])
            digests = np.ravel(multihost_utils.process_allgather(np.uint32(digest))).tolist()
            if len(set(digests)) > 1:
                raise RuntimeError(
                    f"the drafts of step {self.step} differ between processes (digests {digests}): every process must "
                    "make the same calls with the same arguments and a deterministic drafter of the same history; "
                    "processes='broadcast' takes the drafts of process 0"
                )
            return packed, drafts
        # The shape, too, is process 0's to say.
        sent = np.zeros((2, packed.shape[1], widest + 1), np.int32)
        sent[..., 0] = packed.shape[-1]
        sent[..., 1 : packed.shape[-1] + 1] = packed
        got = np.asarray(multihost_utils.broadcast_one_to_all(sent))
        theirs = got[..., 1 : int(got[0, 0, 0]) + 1]
        if np.array_equal(theirs, packed):
            return packed, drafts
        return theirs, unpack(theirs)
