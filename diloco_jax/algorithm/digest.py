"""A digest of named arrays."""

from collections.abc import Mapping
import json
from typing import Any

import numpy as np
import xxhash


def tree_digest(tree: Mapping[str, Any]) -> str:
  """Hex XXH3-128 over names, dtypes, shapes and bytes, by sorted name.

  Equal digests on two participants mean equal values, bit for bit. It tells
  errors apart, not forgeries.
  """
  digest = xxhash.xxh3_128()
  for name in sorted(tree):
    array = np.asarray(tree[name])
    # Both: the name tells types of ml_dtypes apart, the other byte orders.
    dtype = [array.dtype.name, array.dtype.str]
    # JSON marks its own end, so that no two trees give the same bytes.
    digest.update(json.dumps([name, dtype, array.shape]).encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
  return digest.hexdigest()
