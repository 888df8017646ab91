r"""Two islands, two global steps: does it run at all?

Command:
  python -m diloco_jax train --config=experiments/configs/tiny.py \
    --workdir=runs/tiny
Expected time: seconds. Hardware: any. Result: none worth looking at.
"""

from ml_collections import ConfigDict

from diloco_jax import config as config_lib


def get_config() -> ConfigDict:
  """A toy for tests: every part takes part, nothing is learnt."""
  config = config_lib.default_config()
  config.islands = 2
  config.steps = 2
  config.model.width = 16
  config.model.depth = 1
  config.model.heads = 2
  config.data.sequence = 16
  config.data.batch = 2
  config.inner.warmup_steps = 1
  config.sync.fragments = 2
  config.sync.period = 2
  config.sync.overlap = 1
  config.launch.runtime = 'threads'
  config.metrics.eval_tokens = 64
  config.metrics.tensorboard = False
  return config
