"""Next-byte prediction by a decoder-only transformer."""

from collections.abc import Iterator
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.data import corpus
from diloco_jax.data import samples
from diloco_jax.models import transformer

SAMPLE_PROMPT = b'def '
SAMPLE_TEMPERATURE = 0.7


class LanguageModelTask:
  """A byte-level language model on text."""

  def __init__(
    self,
    model: transformer.ModelOptions,
    data: samples.DataOptions,
    seed: int,
  ):
    """Nothing is read before the first batch is asked for."""
    self.model = model
    self.data = data
    self._seed = seed
    self._graph, _ = nnx.split(
      nnx.eval_shape(lambda: transformer.Transformer(model, nnx.Rngs(params=0)))
    )

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    """Parameters as nested dicts of f32 arrays; no other state."""
    module = transformer.Transformer(self.model, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(module, nnx.Param)), {}

  def logits(
    self, params: Any, tokens_BxL: jax.Array, dtype: Any = jnp.float32
  ) -> jax.Array:
    """[B, L, V] f32."""
    state = nnx.eval_shape(
      lambda: nnx.state(
        transformer.Transformer(self.model, nnx.Rngs(params=0)), nnx.Param
      )
    )
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(self._graph, state)(tokens_BxL, dtype)

  def loss(
    self, params: Any, state: Any, batch: Any, key: jax.Array, train: bool
  ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
    """Mean cross-entropy in nats a byte.

    Matrices are multiplied in the dtype of the parameters: the trainer casts
    them where mixed precision is asked for.
    """
    del key, train
    tokens = batch['tokens']
    dtype = params['layers'][0]['attention']['query'].dtype
    logits = self.logits(params, tokens[:, :-1], dtype)
    targets = tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    hits = jnp.argmax(logits, axis=-1) == targets
    metrics = {'accuracy': jnp.mean(hits.astype(jnp.float32))}
    return jnp.mean(losses), (state, metrics)

  def batches(
    self, split: str, lease: samples.Lease | None
  ) -> Iterator[dict[str, np.ndarray]]:
    """Batches of a lease for training; the held-out set once, in order."""
    text = corpus.load(self.data.path).split(split)
    if split == corpus.TEST:
      return samples.in_order(text, self.data)
    assert lease is not None
    return samples.Samples(text, self.data, lease, self._seed)

  def batch_tokens(self, batch: Any) -> int:
    """Bytes that are predicted."""
    rows, length = batch['tokens'].shape
    return int(rows * (length - 1))

  def sharding_rules(self) -> dict[str, tuple[str | None, ...]]:
    """Parameter path -> mesh axis of each dimension."""
    return {
      r'embed$': ('tensor', 'fsdp'),
      r'lm_head$': ('fsdp', 'tensor'),
      r'attention/(query|key|value)$': ('fsdp', 'tensor'),
      r'attention/output$': ('tensor', 'fsdp'),
      r'mlp/(gate|up)$': ('fsdp', 'tensor'),
      r'mlp/down$': ('tensor', 'fsdp'),
      r'scale$': (None,),
    }

  def sample(self, params: Any, count: int, key: jax.Array) -> str:
    """Text that the model writes after SAMPLE_PROMPT, `count` bytes long."""
    length = max(count, len(SAMPLE_PROMPT) + 1)
    buffer = np.zeros((1, length), np.int32)
    buffer[0, : len(SAMPLE_PROMPT)] = np.frombuffer(SAMPLE_PROMPT, np.uint8)
    written = _write(self, params, jnp.asarray(buffer), key)
    return bytes(np.asarray(written[0], np.uint8)).decode('utf-8', 'replace')


@functools.partial(jax.jit, static_argnums=0)
def _write(
  task: LanguageModelTask, params: Any, buffer: jax.Array, key: jax.Array
) -> jax.Array:
  """Fill the buffer from the prompt's end on, one byte at a time."""

  def step(
    position: jax.Array, carry: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    text, key = carry
    key, draw = jax.random.split(key)
    logits = task.logits(params, text)[:, position - 1] / SAMPLE_TEMPERATURE
    return text.at[:, position].set(jax.random.categorical(draw, logits)), key

  start = len(SAMPLE_PROMPT)
  text, _ = jax.lax.fori_loop(start, buffer.shape[1], step, (buffer, key))
  return text
