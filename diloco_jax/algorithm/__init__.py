"""The maths of the DiLoCo family: pure functions on arrays."""

from diloco_jax.algorithm.adopt import adopt_blend
from diloco_jax.algorithm.adopt import adopt_overwrite
from diloco_jax.algorithm.adopt import adopt_rebase
from diloco_jax.algorithm.adopt import rebase_shift
from diloco_jax.algorithm.compress import Encoded
from diloco_jax.algorithm.compress import decode
from diloco_jax.algorithm.compress import encode
from diloco_jax.algorithm.compress import encoded_spec
from diloco_jax.algorithm.compress import from_buffers
from diloco_jax.algorithm.compress import to_buffers
from diloco_jax.algorithm.digest import tree_digest
from diloco_jax.algorithm.fragments import Partition
from diloco_jax.algorithm.fragments import partition
from diloco_jax.algorithm.outer import OuterOptions
from diloco_jax.algorithm.outer import make_merge
from diloco_jax.algorithm.outer import merge
from diloco_jax.algorithm.outer import outer_optimizer
from diloco_jax.algorithm.pseudogradient import radial_directional_mean
from diloco_jax.algorithm.pseudogradient import token_weight
from diloco_jax.algorithm.pseudogradient import weighted_mean

__all__ = [
  'Encoded',
  'OuterOptions',
  'Partition',
  'adopt_blend',
  'adopt_overwrite',
  'adopt_rebase',
  'decode',
  'encode',
  'encoded_spec',
  'from_buffers',
  'make_merge',
  'merge',
  'outer_optimizer',
  'partition',
  'radial_directional_mean',
  'rebase_shift',
  'to_buffers',
  'token_weight',
  'tree_digest',
  'weighted_mean',
]
