r"""DiLoCo: every island waits, all parameters are merged at once.

Command:
  python -m diloco_jax train --config=experiments/configs/diloco.py \
    --workdir=runs/diloco
Expected time: a few minutes. Hardware: two CPU cores. Result: not yet run.
Paper: DiLoCo, arXiv 2311.08105 (H=500; 30 here, the run is short).
"""

from ml_collections import ConfigDict

from diloco_jax import config as config_lib


def get_config() -> ConfigDict:
  """The quickstart's model and data with the synchronous algorithm."""
  config = config_lib.default_config()
  config.preset = 'diloco'
  config.islands = 4
  config.steps = 600
  config.data.sequence = 128
  config.data.batch = 8
  config.inner.lr = 6e-3
  return config
