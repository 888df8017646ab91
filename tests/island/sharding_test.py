"""Meshes and shardings from shapes alone: no device computes anything."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
import optax

from diloco_jax.errors import UserError
from diloco_jax.island import sharding
from diloco_jax.island.sharding import MeshOptions


def mesh(data=1, fsdp=1, tensor=1, expert=1):
  return AbstractMesh((data, fsdp, tensor, expert), sharding.AXES)


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


RULES = {r'w$': ('fsdp', 'tensor'), r'special': ('tensor', None)}


class MeshTest(parameterized.TestCase):
  @parameterized.parameters(
    (MeshOptions(), 4, (4, 1, 1, 1)),
    (MeshOptions(fsdp=2), 8, (4, 2, 1, 1)),
    (MeshOptions(data=1, fsdp=-1, tensor=2), 8, (1, 4, 2, 1)),
    (MeshOptions(data=2, fsdp=2, tensor=2, expert=1), 8, (2, 2, 2, 1)),
  )
  def test_the_open_axis_takes_the_rest(self, options, devices, wanted):
    self.assertEqual(sharding.axis_sizes(options, devices), wanted)

  @parameterized.parameters(
    (MeshOptions(fsdp=3), 4),
    (MeshOptions(data=2, fsdp=1), 4),  # too few
    (MeshOptions(data=8), 4),  # too many
    (MeshOptions(fsdp=-1), 4),  # two open axes
    (MeshOptions(tensor=0), 4),
    (MeshOptions(data=-2, fsdp=-2), 4),
  )
  def test_a_mesh_that_does_not_fit_is_told(self, options, devices):
    with self.assertRaises(UserError) as caught:
      sharding.axis_sizes(options, devices)
    (problem,) = caught.exception.problems
    self.assertEqual(problem.where, 'mesh')
    self.assertIn(f'fsdp={options.fsdp}', problem.got)
    self.assertIn(str(devices), problem.expected)

  def test_one_device(self):
    made = sharding.make_mesh(MeshOptions(), jax.devices()[:1])
    self.assertEqual(dict(made.shape), dict.fromkeys(sharding.AXES, 1))


class ShardingTest(absltest.TestCase):
  def test_rules_choose_by_name_first_one_counts(self):
    shapes = {
      'a': {'w': shape(8, 4), 'special': shape(4, 3)},
      'special_w': shape(8, 4),
      'free': shape(5),
    }
    chosen = sharding.param_shardings(shapes, mesh(fsdp=2, tensor=2), RULES)
    specs = jax.tree.map(lambda s: s.spec, chosen)
    self.assertEqual(specs['a']['w'], P('fsdp', 'tensor'))
    self.assertEqual(specs['a']['special'], P('tensor', None))
    self.assertEqual(specs['special_w'], P('fsdp', 'tensor'))
    self.assertEqual(specs['free'], P())

  def test_a_rule_of_another_rank_is_a_mistake_of_the_task(self):
    with self.assertRaisesRegex(ValueError, "'b/w' has rank 3"):
      sharding.param_shardings({'b': {'w': shape(2, 2, 2)}}, mesh(), RULES)

  def test_every_indivisible_dimension_is_named(self):
    shapes = {'w': shape(6, 9), 'x': {'w': shape(10, 4)}}
    with self.assertRaises(UserError) as caught:
      sharding.param_shardings(shapes, mesh(fsdp=4, tensor=2), RULES)
    found = [(p.where, p.expected) for p in caught.exception.problems]
    self.assertEqual(
      found,
      [
        ('mesh.fsdp', 'a divisor of 6, a dimension of w (6, 9)'),
        ('mesh.tensor', 'a divisor of 9, a dimension of w (6, 9)'),
        ('mesh.fsdp', 'a divisor of 10, a dimension of x/w (10, 4)'),
      ],
    )

  def test_a_batch_divides_over_data_fsdp_and_parts(self):
    sharding.check_batch(24, 3, mesh(data=2, fsdp=4, tensor=5))
    with self.assertRaises(UserError) as caught:
      sharding.check_batch(16, 3, mesh(data=2, fsdp=4))
    (problem,) = caught.exception.problems
    self.assertEqual(problem.where, 'data.batch')
    self.assertIn('multiple of 24', problem.expected)

  def test_batch_and_dimensions_are_told_at_once(self):
    with self.assertRaises(UserError) as caught:
      sharding.fit({'w': shape(6, 4)}, mesh(fsdp=4), RULES, 3, 1)
    where = [p.where for p in caught.exception.problems]
    self.assertEqual(where, ['data.batch', 'mesh.fsdp'])
    chosen = sharding.fit({'w': shape(8, 4)}, mesh(fsdp=4), RULES, 4, 1)
    self.assertEqual(chosen['w'].spec, P('fsdp', 'tensor'))

  def test_moments_are_sharded_as_their_parameters(self):
    shapes = {'a': {'w': shape(8, 4)}, 'w': shape(8, 4), 'b': shape(8)}
    on = mesh(fsdp=2, tensor=2)
    # The tensors of the same shape differ in their rule.
    rules = {r'a/w$': ('tensor', 'fsdp'), r'w$': ('fsdp', 'tensor')}
    chosen = sharding.param_shardings(shapes, on, rules)
    moments = jax.eval_shape(optax.adam(0.1).init, shapes)
    state = sharding.like_params(moments, shapes, chosen, on)[0]
    for moment in (state.mu, state.nu):
      self.assertEqual(moment['a']['w'].spec, P('tensor', 'fsdp'))
      self.assertEqual(moment['w'].spec, P('fsdp', 'tensor'))
      self.assertEqual(moment['b'].spec, P())
    self.assertEqual(state.count.spec, P())

  def test_batches_are_split_over_data_and_fsdp(self):
    spec = sharding.batch_sharding(mesh(data=2, fsdp=2)).spec
    self.assertEqual(spec, P(('data', 'fsdp')))


if __name__ == '__main__':
  absltest.main()
