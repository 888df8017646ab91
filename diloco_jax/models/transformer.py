"""A decoder-only transformer: RMSNorm, rotary positions, gated MLP.

Shapes in names: B batch, L positions, D width, H heads, K head width, V
vocabulary.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

# Deviation of what enters the first layer. Much less, and the first layers'
# outputs would drown the tokens.
EMBEDDING_SCALE = 0.5
# Of the head, in 1 / sqrt(D): the first logits are small, the first loss near
# that of the uniform distribution.
HEAD_SCALE = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
  """The shape of the model; the default has about 0.12 M parameters."""

  vocab: int = 256  # bytes
  width: int = 64  # D
  depth: int = 2  # layers
  heads: int = 4  # H
  mlp_ratio: float = 2.75  # width of the gated MLP, in D
  tie_embeddings: bool = False  # one matrix for input and output
  qk_norm: bool = False  # normalise queries and keys, with a learned gain
  rope_theta: float = 100.0  # base of the rotary wavelengths
  remat: bool = False  # recompute layers in the backward pass

  @property
  def mlp_width(self) -> int:
    return int(self.width * self.mlp_ratio)


def rotate(x_BxLxHxK: jax.Array, theta: float) -> jax.Array:
  """Rotary positions: pairs (k, k + K/2) turn by L / theta^(2k/K)."""
  length, half = x_BxLxHxK.shape[1], x_BxLxHxK.shape[-1] // 2
  rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), rates)
  cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
  first, second = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return turned.astype(x_BxLxHxK.dtype)


def rms_normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
  """x / rms(x) * scale over the last axis, in f32."""
  wide = x.astype(jnp.float32)
  wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
  wide = wide * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
  return wide.astype(x.dtype)


class RMSNorm(nnx.Module):
  """Root-mean-square normalisation with a learned scale."""

  def __init__(self, width: int):
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

  def __call__(self, x: jax.Array) -> jax.Array:
    return rms_normalize(x, self.scale[...])


def _matrix(key: jax.Array, rows: int, columns: int, scale: float) -> nnx.Param:
  deviation = scale / rows**0.5
  return nnx.Param(
    deviation * jax.random.normal(key, (rows, columns), jnp.float32)
  )


class Attention(nnx.Module):
  """Causal self-attention."""

  def __init__(self, options: ModelOptions, rngs: nnx.Rngs):
    width = options.width
    self.options = options
    self.query = _matrix(rngs.params(), width, width, 1.0)
    self.key = _matrix(rngs.params(), width, width, 1.0)
    self.value = _matrix(rngs.params(), width, width, 1.0)
    # Residual branches start smaller, the deeper the model.
    self.output = _matrix(
      rngs.params(), width, width, (2 * options.depth) ** -0.5
    )
    if options.qk_norm:
      # Without gains no score could exceed sqrt(K).
      self.query_norm = RMSNorm(width // options.heads)
      self.key_norm = RMSNorm(width // options.heads)

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    options = self.options
    batch, length, width = x_BxLxD.shape
    dtype = x_BxLxD.dtype
    heads = (batch, length, options.heads, width // options.heads)

    def project(weight: nnx.Param) -> jax.Array:
      return (x_BxLxD @ weight[...].astype(dtype)).reshape(heads)

    q, k, v = project(self.query), project(self.key), project(self.value)
    if options.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    q, k = rotate(q, options.rope_theta), rotate(k, options.rope_theta)
    scores = jnp.einsum('blhk,bmhk->bhlm', q, k).astype(jnp.float32)
    scores = scores * heads[-1] ** -0.5
    causal = jnp.tril(jnp.ones((1, 1, length, length), bool))
    scores = jnp.where(causal, scores, -1e30)
    att_BxHxLxL = jax.nn.softmax(scores, axis=-1).astype(dtype)
    mixed = jnp.einsum('bhlm,bmhk->blhk', att_BxHxLxL, v)
    return mixed.reshape(batch, length, width) @ self.output[...].astype(dtype)


class MLP(nnx.Module):
  """Gated MLP: down(silu(gate x) * up x)."""

  def __init__(self, options: ModelOptions, rngs: nnx.Rngs):
    width, inner = options.width, options.mlp_width
    self.gate = _matrix(rngs.params(), width, inner, 1.0)
    self.up = _matrix(rngs.params(), width, inner, 1.0)
    self.down = _matrix(
      rngs.params(), inner, width, (2 * options.depth) ** -0.5
    )

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    dtype = x_BxLxD.dtype
    gate = jax.nn.silu(x_BxLxD @ self.gate[...].astype(dtype))
    up = x_BxLxD @ self.up[...].astype(dtype)
    return (gate * up) @ self.down[...].astype(dtype)


class Layer(nnx.Module):
  """One pre-norm transformer layer."""

  def __init__(self, options: ModelOptions, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(options.width)
    self.attention = Attention(options, rngs)
    self.mlp_norm = RMSNorm(options.width)
    self.mlp = MLP(options, rngs)

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD))
    return x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))


class Transformer(nnx.Module):
  """Tokens to logits."""

  def __init__(self, options: ModelOptions, rngs: nnx.Rngs):
    self.options = options
    # A tied matrix is multiplied by sqrt(D) on the way in.
    deviation = EMBEDDING_SCALE
    if options.tie_embeddings:
      deviation *= options.width**-0.5
    self.embed = nnx.Param(
      deviation
      * jax.random.normal(
        rngs.params(), (options.vocab, options.width), jnp.float32
      )
    )
    self.layers = nnx.List([Layer(options, rngs) for _ in range(options.depth)])
    self.norm = RMSNorm(options.width)
    if not options.tie_embeddings:
      self.lm_head = _matrix(
        rngs.params(), options.width, options.vocab, HEAD_SCALE
      )

  def __call__(
    self, tokens_BxL: jax.Array, dtype: jnp.dtype = jnp.float32
  ) -> jax.Array:
    """Logits [B, L, V] in f32; matrices are multiplied in `dtype`."""
    embed = self.embed[...]
    x_BxLxD = embed[tokens_BxL].astype(dtype)
    if self.options.tie_embeddings:
      x_BxLxD = x_BxLxD * self.options.width**0.5
    for layer in self.layers:
      apply = (
        nnx.remat(lambda module, x: module(x))
        if self.options.remat
        else (lambda module, x: module(x))
      )
      x_BxLxD = apply(layer, x_BxLxD)
    x_BxLxD = self.norm(x_BxLxD)
    head = embed.T if self.options.tie_embeddings else self.lm_head[...]
    return (x_BxLxD @ head.astype(dtype)).astype(jnp.float32)
