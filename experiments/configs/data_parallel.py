r"""Data parallel: gradients averaged at every step, the usual reference.

Command:
  python -m diloco_jax train --config=experiments/configs/data_parallel.py \
    --workdir=runs/data_parallel
Expected time: several minutes. Hardware: two CPU cores. Result: not yet run.

One island takes the batches of all: islands * data.batch sequences a step, so
that it sees as many tokens as the runs that it is compared with.
"""

from ml_collections import ConfigDict

from diloco_jax import config as config_lib


def get_config() -> ConfigDict:
  """The quickstart's model, data and tokens without any islands."""
  config = config_lib.default_config()
  config.preset = 'data_parallel'
  config.islands = 4
  config.steps = 600
  config.data.sequence = 128
  config.data.batch = 8
  config.inner.lr = 1.2e-2
  return config
