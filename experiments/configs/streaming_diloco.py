r"""Streaming DiLoCo: one fragment at a time, overlapped with inner steps.

Command:
  python -m diloco_jax train --config=experiments/configs/streaming_diloco.py \
    --workdir=runs/streaming_diloco
Expected time: a few minutes. Hardware: two CPU cores. Result: not yet run.
Paper: Streaming DiLoCo, arXiv 2501.18512. Its H and P grow with the model;
these are the preset's.
"""

from ml_collections import ConfigDict

from diloco_jax import config as config_lib


def get_config() -> ConfigDict:
  """The quickstart's model and data with the streaming algorithm."""
  config = config_lib.default_config()
  config.preset = 'streaming_diloco'
  config.islands = 4
  config.steps = 600
  config.data.sequence = 128
  config.data.batch = 8
  config.inner.lr = 6e-3
  return config
