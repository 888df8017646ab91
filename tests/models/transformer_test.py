"""The transformer against plain NumPy, and properties it must have."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.models import transformer
from diloco_jax.models.transformer import ModelOptions

SMALL = ModelOptions(
  vocab=32, width=16, depth=2, heads=2, mlp_ratio=2.0, qk_norm=True
)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12)).astype(np.int32)


@functools.partial(nnx.jit, static_argnums=0)
def build(options):
  return transformer.Transformer(options, nnx.Rngs(params=0))


@functools.partial(nnx.jit, static_argnums=2)
def forward(model, tokens, dtype=jnp.float32):
  return model(tokens, dtype)


def numpy_rotate(x, theta):
  """Complex rotation of the pairs (k, k + K/2); x: [L, H, K]."""
  length, _, size = x.shape
  half = size // 2
  z = x[..., :half] + 1j * x[..., half:]
  for position in range(length):
    for k in range(half):
      z[position, :, k] *= np.exp(1j * position * theta ** (-2 * k / size))
  return np.concatenate([z.real, z.imag], axis=-1)


def numpy_attention(x, layer, options):
  """One sequence [L, D], one head and one query at a time."""
  length, width = x.shape
  size = width // options.heads
  split = (length, options.heads, size)
  q, k, v = (
    (x @ np.asarray(getattr(layer, name)[...], np.float64)).reshape(split)
    for name in ('query', 'key', 'value')
  )
  if options.qk_norm:
    q = q / np.sqrt((q**2).mean(-1, keepdims=True) + 1e-6)
    k = k / np.sqrt((k**2).mean(-1, keepdims=True) + 1e-6)
    q = q * np.asarray(layer.query_norm.scale[...], np.float64)
    k = k * np.asarray(layer.key_norm.scale[...], np.float64)
  q, k = (numpy_rotate(y, options.rope_theta) for y in (q, k))
  out = np.zeros(split)
  for head in range(options.heads):
    for i in range(length):
      scores = k[: i + 1, head] @ q[i, head] / np.sqrt(size)
      weights = np.exp(scores - scores.max())
      out[i, head] = weights / weights.sum() @ v[: i + 1, head]
  return out.reshape(length, width) @ np.asarray(layer.output[...], np.float64)


class TransformerTest(parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_attention_is_that_of_numpy(self, qk_norm):
    options = dataclasses.replace(SMALL, qk_norm=qk_norm)
    attention = transformer.Attention(options, nnx.Rngs(params=1))
    # Larger than at the start, so that attention is far from uniform.
    for name in ('query', 'key', 'output'):
      weight = getattr(attention, name)
      noise = np.random.default_rng(len(name)).normal(size=weight.shape)
      weight[...] = jnp.asarray(noise, jnp.float32)
    if qk_norm:
      attention.query_norm.scale[...] = jnp.linspace(0.5, 3, 8)
      attention.key_norm.scale[...] = jnp.linspace(2, -1, 8)
    x = np.random.default_rng(1).normal(size=(2, 9, 16))
    got = attention(jnp.asarray(x, jnp.float32))
    want = np.stack([numpy_attention(row, attention, options) for row in x])
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)

  def test_mlp_and_norm_are_those_of_numpy(self):
    mlp = transformer.MLP(SMALL, nnx.Rngs(params=2))
    mlp.down[...] = jnp.asarray(
      np.random.default_rng(5).normal(size=mlp.down.shape), jnp.float32
    )
    x = np.random.default_rng(2).normal(size=(1, 3, 16)).astype(np.float32)
    gate, up, down = (
      np.asarray(w[...], np.float64) for w in (mlp.gate, mlp.up, mlp.down)
    )
    z = x @ gate
    want = (z / (1 + np.exp(-z)) * (x @ up)) @ down
    np.testing.assert_allclose(mlp(jnp.asarray(x)), want, atol=1e-4)
    scale = np.linspace(0.5, 2, 16, dtype=np.float32)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    got = transformer.rms_normalize(jnp.asarray(x), jnp.asarray(scale))
    np.testing.assert_allclose(got, want, rtol=1e-5)

  def test_rotary_scores_depend_on_distance_only(self):
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(2, 8)).astype(np.float32)
    length = 10
    spread = (1, length, 1, 8)
    turned_q = transformer.rotate(jnp.broadcast_to(q, spread), 100.0)
    turned_k = transformer.rotate(jnp.broadcast_to(k, spread), 100.0)
    scores = np.asarray(turned_q[0, :, 0] @ turned_k[0, :, 0].T)
    for distance in range(-length + 1, length):
      diagonal = np.diagonal(scores, distance)
      np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    self.assertGreater(np.ptp(scores[0]), 0.1)
    # A rotation keeps lengths.
    np.testing.assert_allclose(
      np.linalg.norm(turned_q[0, :, 0], axis=-1),
      np.linalg.norm(q),
      rtol=1e-5,
    )

  def test_no_position_sees_a_later_one(self):
    model = randomized(build(SMALL))
    before = np.asarray(forward(model, TOKENS))
    for cut in (1, 7, 11):
      changed = TOKENS.copy()
      changed[:, cut:] = (changed[:, cut:] + 5) % 32
      after = np.asarray(forward(model, changed))
      np.testing.assert_array_equal(after[:, :cut], before[:, :cut])
      self.assertTrue(np.all(np.any(after[:, cut] != before[:, cut], -1)))

  def test_tied_head_is_the_embedding(self):
    tied = dataclasses.replace(SMALL, tie_embeddings=True)

    def names(options):
      params = nnx.to_pure_dict(nnx.state(build(options), nnx.Param))
      return {
        jax.tree_util.keystr(path, simple=True, separator='/')
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
      }

    self.assertEqual(names(SMALL) - names(tied), {'lm_head'})
    model = build(tied)
    self.assertEqual(forward(model, TOKENS).shape, (2, 12, 32))
    # Changing one row moves the logits of that token everywhere.
    before = np.asarray(forward(model, TOKENS))
    unused = next(t for t in range(32) if t not in TOKENS)
    model.embed[...] = model.embed[...].at[unused].multiply(3.0)
    after = np.asarray(forward(model, TOKENS))
    others = [t for t in range(32) if t != unused]
    np.testing.assert_array_equal(after[..., others], before[..., others])
    np.testing.assert_allclose(
      after[..., unused], 3 * before[..., unused], rtol=1e-4, atol=1e-6
    )

  def test_remat_changes_no_value_and_no_gradient(self):
    def value_and_grad(options):
      graph, state = nnx.split(randomized(build(options)))

      def objective(state):
        return jnp.mean(nnx.merge(graph, state)(TOKENS) ** 2)

      value, grads = jax.jit(jax.value_and_grad(objective))(state)
      return value, jax.tree.leaves(grads)

    plain = value_and_grad(SMALL)
    remat = value_and_grad(dataclasses.replace(SMALL, remat=True))
    np.testing.assert_allclose(remat[0], plain[0], rtol=1e-6)
    for a, b in zip(remat[1], plain[1], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

  def test_bf16_is_close_to_f32(self):
    model = randomized(build(SMALL))
    exact = np.asarray(forward(model, TOKENS))
    rounded = forward(model, TOKENS, jnp.bfloat16)
    self.assertEqual(rounded.dtype, jnp.float32)
    error = np.abs(np.asarray(rounded) - exact).max()
    self.assertLess(error, 0.05 * np.abs(exact).max())
    self.assertGreater(error, 0.0)

  def test_the_start_is_near_the_uniform_distribution(self):
    for tied in (False, True):
      model = build(ModelOptions(tie_embeddings=tied))
      logits = np.asarray(forward(model, TOKENS), np.float64)
      # The mean over all tokens that might come next.
      losses = np.log(np.exp(logits).sum(-1)) - logits.mean(-1)
      self.assertAlmostEqual(losses.mean(), np.log(256), delta=0.2)


def randomized(model):
  """Every tensor at the scale of one, norms and zeros too."""
  state = nnx.state(model, nnx.Param)
  leaves, treedef = jax.tree.flatten(state)
  rng = np.random.default_rng(7)
  leaves = [
    jnp.asarray(rng.normal(size=x.shape) / x.shape[0] ** 0.5, jnp.float32)
    + (x.ndim == 1)
    for x in leaves
  ]
  nnx.update(model, jax.tree.unflatten(treedef, leaves))
  return model


if __name__ == '__main__':
  absltest.main()
