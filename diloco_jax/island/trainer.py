"""Inner training as one jitted step; knows nothing of DiLoCo."""

from collections.abc import Iterable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax

from diloco_jax.island import sharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InnerOptions:
  """The inner optimizer and its schedule."""

  optimizer: str = 'adamw'
  lr: float = 6e-3  # peak
  warmup_steps: int = 50
  total_steps: int = 600  # of the cosine; the rate stays at its end after
  min_lr_ratio: float = 0.1  # end of the cosine, in lr
  weight_decay: float = 0.1  # matrices only, no embeddings
  beta1: float = 0.9
  beta2: float = 0.95
  clip: float = 1.0  # global norm of the gradient; 0: not clipped
  accumulate: int = 1  # parts of a batch, one after the other
  bf16: bool = False  # multiply in bf16; parameters stay f32
  rewarm: int = 0  # steps of a ramp for a newcomer without moments


def schedule(options: InnerOptions) -> optax.Schedule:
  """Linear warm-up, cosine decay, then constant; by inner step index.

  On the host, in plain floats: asking a device for the rate would wait for
  the steps that it has not finished.
  """
  low = options.lr * options.min_lr_ratio
  decay = max(1, options.total_steps - options.warmup_steps)

  def rate(index: int) -> float:
    if index < options.warmup_steps:
      return options.lr * index / options.warmup_steps
    done = min(1.0, (index - options.warmup_steps) / decay)
    return low + (options.lr - low) * (1 + math.cos(math.pi * done)) / 2

  return rate


def decayed(params: Any) -> Any:
  """Which tensors decay: matrices; not norms, biases, or embeddings."""

  def choose(path: Any, leaf: Any) -> bool:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return len(leaf.shape) >= 2 and 'embed' not in name

  return jax.tree_util.tree_map_with_path(choose, params)


def inner_optimizer(options: InnerOptions) -> optax.GradientTransformation:
  """AdamW without its rate: the trainer multiplies it in by step index.

  The gradient is clipped by its global norm first. Weight decay is decoupled
  (Loshchilov and Hutter, 1711.05101) and leaves out norms, biases and
  embeddings, see `decayed`.
  """
  steps = [
    optax.scale_by_adam(options.beta1, options.beta2),
    optax.add_decayed_weights(options.weight_decay, decayed),
  ]
  if options.clip > 0:
    steps.insert(0, optax.clip_by_global_norm(options.clip))
  return optax.chain(*steps, optax.scale(-1.0))


class Trainer:
  """Owns the optimizer's and the model's state; parameters pass through.

  A task's own `inner_optimizer` replaces the default one whole, its rate
  included: of `InnerOptions` only `accumulate`, `bf16` and `rewarm` act then.
  """

  def __init__(
    self,
    task: Any,
    inner: InnerOptions,
    mesh_options: sharding.MeshOptions,
    *,
    seed: int,
    batch_size: int,
    devices: Any = None,
  ):
    """Checks the mesh and plans the shardings; allocates nothing.

    Raises:
      UserError: mesh, batch or dimensions do not fit.
    """
    self._task = task
    self._inner = inner
    self._seed = seed
    self.mesh = sharding.make_mesh(mesh_options, devices)
    own = getattr(task, 'inner_optimizer', None)
    self._tx = optax.with_extra_args_support(
      own(inner) if own is not None else inner_optimizer(inner)
    )
    self._rate = schedule(inner) if own is None else lambda index: 1.0
    rules = getattr(task, 'sharding_rules', dict)()
    key = jax.random.key(seed)
    self.param_shapes, self._state_shapes = jax.eval_shape(task.init, key)
    self.param_shardings = sharding.fit(
      self.param_shapes, self.mesh, rules, batch_size, inner.accumulate
    )
    replicated = NamedSharding(self.mesh, PartitionSpec())
    self._opt_shapes = jax.eval_shape(self._tx.init, self.param_shapes)
    self._opt_shardings = sharding.like_params(
      self._opt_shapes, self.param_shapes, self.param_shardings, self.mesh
    )
    self._state_shardings = jax.tree.map(
      lambda x: replicated, self._state_shapes
    )
    self._batch_sharding = sharding.batch_sharding(self.mesh)
    self._replicated = replicated
    self.index = 0  # cumulative inner steps; the schedule's argument
    self._ramp = (0, 0)  # first step and length of a newcomer's ramp
    self._opt_state: Any = None
    self._state: Any = None
    # Plain numbers, so that it can be saved: keys are no arrays to NumPy.
    self._key = np.asarray(jax.random.key_data(jax.random.fold_in(key, 1)))
    self._step = self._jit_step()
    self._measure = jax.jit(
      self._evaluate_batch,
      in_shardings=(
        self.param_shardings, self._state_shardings, self._batch_sharding,
      ),
      out_shardings=replicated,
    )  # fmt: skip

  # Setting up.

  def init(self) -> Any:
    """Parameters from the seed, in place on the mesh; fresh optimizer."""
    make = jax.jit(
      self._task.init,
      out_shardings=(self.param_shardings, self._state_shardings),
    )
    params, self._state = make(jax.random.key(self._seed))
    self._opt_state = jax.jit(self._tx.init, out_shardings=self._opt_shardings)(
      params
    )
    return params

  def put(self, params: Any) -> Any:
    """Host parameters onto the mesh, as fresh buffers that may be donated."""
    return sharding.put(params, self.param_shapes, self.param_shardings)

  def rewarm(self, steps: int) -> None:
    """Ramp the rate over `steps` from here on: the moments are new."""
    self._ramp = (self.index, steps)

  @property
  def extra(self) -> dict[str, Any]:
    """What belongs to training besides the parameters.

    Arrays, as they are: the next step donates the optimizer's and the model's
    state. `jax.device_get` makes a copy that can be kept; setting it puts the
    values on the mesh as fresh buffers.
    """
    return {
      'optimizer': self._opt_state,
      'state': self._state,
      'key': self._key,
      'index': self.index,
      'ramp': self._ramp,
    }

  @extra.setter
  def extra(self, value: dict[str, Any]) -> None:
    self._opt_state = sharding.put(
      value['optimizer'], self._opt_shapes, self._opt_shardings
    )
    self._state = sharding.put(
      value['state'], self._state_shapes, self._state_shardings
    )
    self._key = np.asarray(value['key'])
    self.index = int(value['index'])
    first, steps = value['ramp']
    self._ramp = (int(first), int(steps))

  def exchange(self, value: dict[str, Any]) -> None:
    """As setting `extra`, of values that are on the mesh: nothing is copied.

    For many islands of one process that share one compiled step.
    """
    self._opt_state, self._state = value['optimizer'], value['state']
    self._key, self.index = value['key'], value['index']
    self._ramp = value['ramp']

  # Training.

  def rate(self) -> float:
    """What the update of the next step is multiplied by."""
    first, steps = self._ramp
    done = self.index - first + 1
    return self._rate(self.index) * min(1.0, done / max(1, steps))

  def step(self, params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One inner step, asynchronous; `params` are donated.

    Returns:
      The new parameters, and the loss: an f32 scalar, not donated later.
    """
    carry, loss = self._step(
      (params, self._opt_state, self._state),
      self._place(batch),
      self._key,
      np.int32(self.index),
      np.float32(self.rate()),
    )
    params, self._opt_state, self._state = carry
    self.index += 1
    return params, loss

  def compile(self, batch: Any) -> jax.stages.Compiled:
    """Compile the step for batches like this one, ahead of the first.

    Returns:
      The compiled step, which tells its memory, cost and program text.
    """
    carry = (self.param_shapes, self._opt_shapes, self._state_shapes)
    self._step = (
      self._jit_step()
      .lower(carry, self._place(batch), self._key, np.int32(0), np.float32(0))
      .compile()
    )
    return self._step

  def _place(self, batch: Any) -> Any:
    return jax.device_put(batch, self._batch_sharding)

  def _jit_step(self) -> Any:
    carry = (
      self.param_shardings, self._opt_shardings, self._state_shardings,
    )  # fmt: skip
    whole = self._replicated
    return jax.jit(
      self._step_fn,
      in_shardings=(carry, self._batch_sharding, whole, whole, whole),
      out_shardings=(carry, whole),
      donate_argnums=0,
    )

  def _step_fn(
    self,
    carry: Any,
    batch: Any,
    key: jax.Array,
    index: jax.Array,
    rate: jax.Array,
  ) -> Any:
    params, opt_state, state = carry
    use = jax.random.fold_in(jax.random.wrap_key_data(key), index)
    grads, state, loss = self._gradients(params, state, batch, use)
    grads = jax.lax.with_sharding_constraint(grads, self.param_shardings)
    # An optimizer with a schedule of its own may ask for the step's index.
    updates, opt_state = self._tx.update(grads, opt_state, params, index=index)
    updates = jax.tree.map(lambda x: rate * x, updates)
    params = optax.apply_updates(params, updates)
    return (params, opt_state, state), loss

  def _loss(self, params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
    if self._inner.bf16:
      params = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x,
        params,
      )
    params = sharding.gather_fsdp(params, self.param_shardings)
    loss, (state, _) = self._task.loss(params, state, batch, key, True)
    return loss.astype(jnp.float32), state

  def _gradients(
    self, params: Any, state: Any, batch: Any, key: jax.Array
  ) -> tuple[Any, Any, jax.Array]:
    """Mean gradient, new state and mean loss of a batch, in parts."""
    value_and_grad = jax.value_and_grad(self._loss, has_aux=True)
    parts = self._inner.accumulate
    if parts == 1:
      (loss, state), grads = value_and_grad(params, state, batch, key)
      return grads, state, loss
    # Part p takes rows p, p + parts, ...: each part is spread over all devices,
    # as the batch is.
    split = jax.tree.map(
      lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(
        0, 1
      ),
      batch,
    )

    def add(carry: Any, part: Any) -> tuple[Any, None]:
      total, state, loss_sum, key = carry
      key, use = jax.random.split(key)
      (loss, state), grads = value_and_grad(params, state, part, use)
      total = jax.tree.map(jnp.add, total, grads)
      return (total, state, loss_sum + loss, key), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    start = (zeros, state, jnp.float32(0.0), key)
    (total, state, loss_sum, _), _ = jax.lax.scan(add, start, split)
    grads = jax.tree.map(lambda x: x / parts, total)
    return grads, state, loss_sum / parts

  # Evaluation.

  def _evaluate_batch(self, params: Any, state: Any, batch: Any) -> Any:
    key = jax.random.key(0)
    params = sharding.gather_fsdp(params, self.param_shardings)
    loss, (_, metrics) = self._task.loss(params, state, batch, key, False)
    return {'loss': loss.astype(jnp.float32), **metrics}

  def _start_state(self) -> Any:
    """The model's state as the task makes it; nothing runs if it has none."""
    if not jax.tree.leaves(self._state_shapes):
      return self._state_shapes
    _, state = jax.jit(
      self._task.init,
      out_shardings=(self.param_shardings, self._state_shardings),
    )(jax.random.key(self._seed))
    return state

  def evaluate(
    self, params: Any, batches: Iterable[Any], state: Any = None
  ) -> dict[str, float]:
    """Means over batches, weighted by tokens; with the number of tokens."""
    if state is None:
      state = self._start_state()
    count = getattr(self._task, 'batch_tokens', None)
    sums: dict[str, float] = {}
    total = 0
    for batch in batches:
      tokens = count(batch) if count else len(next(iter(batch.values())))
      measured = self._measure(params, state, self._place(batch))
      for name, value in measured.items():
        sums[name] = sums.get(name, 0.0) + float(value) * tokens
      total += tokens
    return {
      **{name: value / max(1, total) for name, value in sums.items()},
      'tokens': total,
    }
