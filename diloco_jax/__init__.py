"""diloco_jax: training one model on many islands of accelerators in JAX.

`diloco_jax.run` is a whole run in this process, `diloco_jax.connect` joins one
from any training loop, `diloco_jax.algorithm` has the mathematics on its own.
"""

from typing import Any

__version__ = '0.1.0'
__all__ = ['connect', 'run']


def __getattr__(name: str) -> Any:
  # Importing a part of the package, such as `protocol`, imports no jax.
  if name == 'connect':
    from diloco_jax.launch.connecting import connect

    return connect
  if name == 'run':
    from diloco_jax.launch import run

    return run
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
