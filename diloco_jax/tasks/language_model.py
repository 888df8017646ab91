"""Next-byte prediction by a decoder-only transformer."""

from collections.abc import Iterator
import functools
from typing import Any

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.data import corpus
from diloco_jax.data import samples
from diloco_jax.models import transformer

SAMPLE_PROMPT = 'def '
SAMPLE_TEMPERATURE = 0.7
# A sampled text is written in a buffer of a multiple of this many bytes, so
# that prompts of different lengths share one compiled program.
BUFFER_BYTES = 128


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
  """Layers are numbered by strings: a checkpoint knows no other keys."""
  return tuple(str(part) for part in path)


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
    self._graph, self._abstract = nnx.split(
      nnx.eval_shape(lambda: transformer.Transformer(model, nnx.Rngs(params=0)))
    )

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    """Parameters as nested dicts of f32 arrays; no other state."""
    module = transformer.Transformer(self.model, nnx.Rngs(params=key))
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    params = {_names(path): variable[...] for path, variable in flat}
    return traverse_util.unflatten_dict(params), {}

  def module(self, params: Any) -> transformer.Transformer:
    """The Flax module with these parameters in it."""
    # By name: lists of ten and more layers are in another order as strings.
    flat = traverse_util.flatten_dict(params)
    state = nnx.map_state(
      lambda path, variable: variable.replace(flat[_names(path)]),
      self._abstract,
    )
    return nnx.merge(self._graph, state)

  def logits(
    self, params: Any, tokens_BxL: jax.Array, dtype: Any = jnp.float32
  ) -> jax.Array:
    """[B, L, V] f32."""
    return self.module(params)(tokens_BxL, dtype)

  def loss(
    self, params: Any, state: Any, batch: Any, key: jax.Array, train: bool
  ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
    """Mean cross-entropy in nats a byte, of those in the batch's mask.

    Matrices are multiplied in the dtype of the parameters: the trainer casts
    them where mixed precision is asked for.
    """
    del key, train
    tokens = batch['tokens']
    dtype = params['embed'].dtype
    logits = self.logits(params, tokens[:, :-1], dtype)
    targets = tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    hits = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    mask = batch.get('mask')
    metrics = {'accuracy': jnp.mean(hits, where=mask)}
    return jnp.mean(losses, where=mask), (state, metrics)

  def batches(
    self, split: str, lease: samples.Lease | None
  ) -> Iterator[dict[str, np.ndarray]]:
    """Batches of a lease for training; the held-out text once.

    Any first batches of the held-out text are a fair and fixed sample of it,
    see `samples.held_out`.
    """
    text = corpus.load(self.data.path).split(split)
    if split == corpus.TEST:
      return samples.held_out(text, self.data)
    assert lease is not None
    return samples.Samples(text, self.data, lease, self._seed)

  def batch_tokens(self, batch: Any) -> int:
    """Bytes that are predicted."""
    if 'mask' in batch:
      return int(np.sum(batch['mask']))
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

  def sample(
    self,
    params: Any,
    count: int,
    key: jax.Array,
    *,
    prompt: str = SAMPLE_PROMPT,
    temperature: float = SAMPLE_TEMPERATURE,
  ) -> str:
    """The prompt, and `count` bytes that the model writes after it.

    Args:
      params: of the model.
      count: bytes to write.
      key: of the draws.
      prompt: not empty.
      temperature: divides the logits; 0: always the likeliest byte.
    """
    start = prompt.encode()
    assert start, 'the model needs a byte to begin with'
    end = len(start) + count
    buffer = np.zeros(-(-end // BUFFER_BYTES) * BUFFER_BYTES, np.int32)
    buffer[: len(start)] = np.frombuffer(start, np.uint8)
    written = _write(
      self, params, buffer, len(start), end, key, np.float32(temperature)
    )
    return bytes(np.asarray(written[:end], np.uint8)).decode(errors='replace')


@functools.partial(jax.jit, static_argnums=0)
def _write(
  task: LanguageModelTask,
  params: Any,
  text: jax.Array,
  start: jax.Array,
  end: jax.Array,
  key: jax.Array,
  temperature: jax.Array,
) -> jax.Array:
  """Fill text[start:end], a byte at a time, from a window before each."""
  # Longer windows than those of training hold positions never seen.
  size = min(task.data.sequence, text.shape[0])

  def step(position: jax.Array, text: jax.Array) -> jax.Array:
    first = jnp.maximum(position - size, 0)
    window = jax.lax.dynamic_slice(text, (first,), (size,))
    # What is not yet written lies behind, where the model does not look.
    logits = task.logits(params, window[None])[0, position - 1 - first, :256]
    draw = jax.random.categorical(
      jax.random.fold_in(key, position),
      logits / jnp.where(temperature > 0, temperature, 1),
    )
    byte = jnp.where(temperature > 0, draw, jnp.argmax(logits))
    return text.at[position].set(byte.astype(text.dtype))

  return jax.lax.fori_loop(start, end, step, text)
