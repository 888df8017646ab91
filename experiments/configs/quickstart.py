r"""The first run: four islands on one small machine, nobody waits.

Command:
  python -m diloco_jax train --config=experiments/configs/quickstart.py \
    --workdir=runs/quickstart
Expected time: a few minutes. Hardware: two CPU cores, 4 GiB of memory; no
accelerator, no download. Result: see README.
Paper: Decoupled DiLoCo, arXiv 2604.21428, at toy size.

With `--async_mode=false` the islands wait for each other (DiLoCo).
"""

from ml_collections import ConfigDict

from diloco_jax import config as config_lib


def get_config() -> ConfigDict:
  """A byte-level transformer of 0.13 M parameters on Python source."""
  config = config_lib.default_config()
  config.preset = 'decoupled_diloco'
  config.islands = 4
  config.steps = 600

  config.data.sequence = 128
  config.data.batch = 8
  config.inner.lr = 1.2e-2

  # P=24, as the preset has it, may miss its period on two busy cores.
  config.sync.fragments = 12
  config.sync.period = 24
  config.sync.overlap = 2
  config.sync.adopt = 'rebase'
  config.outer.lr = 1.0
  # With 25 merges of a fragment, momentum costs more than it brings
  # (experiments/parity).
  config.outer.momentum = 0.0
  return config
