"""diloco_jax: training one model on many islands of accelerators in JAX.

`diloco_jax.connect` joins a run from any training loop; `diloco_jax.algorithm`
has the mathematics on its own.
"""

from typing import Any

__version__ = '0.1.0'
__all__ = ['connect']


def __getattr__(name: str) -> Any:
  # Importing a part of the package, such as `protocol`, imports no jax.
  if name == 'connect':
    from diloco_jax.launch.connecting import connect

    return connect
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
