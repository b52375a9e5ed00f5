"""Names for the full blocks of a sequence, so that sequences which begin alike can be told.

A block's name is a digest of everything up to its end, and of the sequence's root: equal names,
equal prefixes. A set of names is thus a trie of prefixes. The device has hashes of its own, which
never leave it; these names stay on the host.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence


def extend_keys(
    keys: list[bytes], token_ids: Sequence[int], root: tuple[int, int, int, int], block_size: int
) -> None:
    """Appends the names of the full blocks that `keys` lacks. The tokens named so far are the same
    as ever."""
    for block in range(len(keys), len(token_ids) // block_size):
        before = keys[-1] if keys else struct.pack("<4I", *root)
        tokens = array("q", token_ids[block * block_size : (block + 1) * block_size])
        keys.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest())
