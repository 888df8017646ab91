"""Plain loops that say what a run must compute.

They share with the package the loss of the task and the order of its batches.
Everything but the gradient is NumPy in f64, on dicts {path: array}.
"""

import functools
import math

import jax
import numpy as np

from tests.equivalence import toy


@functools.cache
def gradient_of(task):
  def loss(params, batch):
    return task.loss(params, {}, batch, None, True)[0]

  return jax.jit(jax.grad(loss))


@functools.cache
def _start(task, seed):
  return toy.flat(jax.device_get(jax.jit(task.init)(jax.random.key(seed))[0]))


def start(task, seed=0):
  return dict(_start(task, seed))


class Learner:
  """AdamW with clipping, warm-up and cosine decay on the batches of a lane."""

  def __init__(self, task, lane=0, seed=0):
    self.task, self.lane, self.steps, self.tokens = task, lane, 0, 0
    self.params = start(task, seed)
    self.first = {x: 0.0 * v for x, v in self.params.items()}
    self.second = {x: 0.0 * v for x, v in self.params.items()}

  def rate(self):
    o, i = toy.INNER, self.steps
    if i < o['warmup_steps']:
      return o['lr'] * i / o['warmup_steps']
    done = (i - o['warmup_steps']) / (o['total_steps'] - o['warmup_steps'])
    low = o['min_lr_ratio']
    wave = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return o['lr'] * (low + (1 - low) * wave)

  def step(self):
    o, rate = toy.INNER, self.rate()
    batch = self.task.batch(self.lane, self.steps)
    g = gradient_of(self.task)(toy.nested(self.params), batch)
    g = toy.flat(jax.device_get(g))
    norm = math.sqrt(sum(float(np.sum(x**2)) for x in g.values()))
    self.steps += 1
    self.tokens += self.task.batch_tokens(batch)
    for name, p in self.params.items():
      x = g[name] * min(1.0, o['clip'] / norm)
      self.first[name] = o['beta1'] * self.first[name] + (1 - o['beta1']) * x
      self.second[name] = (
        o['beta2'] * self.second[name] + (1 - o['beta2']) * x**2
      )
      m = self.first[name] / (1 - o['beta1'] ** self.steps)
      v = self.second[name] / (1 - o['beta2'] ** self.steps)
      decays = p.ndim >= 2 and 'embed' not in name
      update = m / (np.sqrt(v) + 1e-8) + o['weight_decay'] * decays * p
      self.params[name] = p - rate * update


def plain(task, steps, seed=0):
  """One learner, nothing else; the parameters after every step."""
  learner = Learner(task, seed=seed)
  trajectory = [dict(learner.params)]
  for _ in range(steps):
    learner.step()
    trajectory.append(dict(learner.params))
  return trajectory


def diloco(task, *, islands, steps, period, lr, momentum):
  """DiLoCo (arXiv 2311.08105), algorithm 1; a last short period counts."""
  theta = start(task)
  b = {x: 0.0 * v for x, v in theta.items()}
  learners = [Learner(task, m) for m in range(islands)]
  for t in range(1, steps + 1):
    for learner in learners:
      learner.step()
    if t % period and t < steps:
      continue
    for x in theta:
      delta = sum(theta[x] - z.params[x] for z in learners) / islands
      b[x] = momentum * b[x] + delta
      theta[x] = theta[x] - lr * (delta + momentum * b[x])
    for learner in learners:
      learner.params = dict(theta)
  return theta


def mean(name, vectors, weights):
  del name
  return sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(
    weights
  )


def rda(name, vectors, weights):
  """Mean length times mean direction; the embedding by the mean."""
  if 'embed' in name:
    return mean(name, vectors, weights)
  lengths = [np.linalg.norm(v) for v in vectors]
  unit = [v / n for v, n in zip(vectors, lengths, strict=True)]
  direction = mean(name, unit, weights)
  radius = mean(name, lengths, weights)
  return radius * direction / np.linalg.norm(direction)


def split(params, fragments):
  """Tensors from large to small, each to the smallest fragment so far."""
  parts = [[] for _ in range(fragments)]
  for name in sorted(params, key=lambda x: (-params[x].size, x)):
    sizes = [sum(params[x].size for x in part) for part in parts]
    parts[sizes.index(min(sizes))].append(name)
  return parts


def blend(alpha):
  def adopt(local, theta, anchor, sent):
    del anchor, sent
    return alpha * local + (1 - alpha) * theta

  return adopt


def rebase(local, theta, anchor, sent):
  return theta + (local - anchor) + sent


def streaming(
  task, *, islands, steps, period, fragments, overlap, adopt, lr, momentum,
  merge=mean, forgets=False,
):  # fmt: skip
  """Streaming DiLoCo (arXiv 2501.18512), algorithm 2, in lock step.

  `forgets`: adopting ends what an island has done since its last capture.
  """
  theta = start(task)
  b = {x: 0.0 * v for x, v in theta.items()}
  learners = [Learner(task, m) for m in range(islands)]
  parts = split(theta, fragments)
  since = [[(0, 0)] * islands for _ in parts]  # steps and tokens merged
  flying, stride = {}, period // fragments

  def capture(p):
    counts = [(z.steps, z.tokens) for z in learners]
    deltas = [{x: theta[x] - z.params[x] for x in parts[p]} for z in learners]
    return counts, deltas

  def outer_step(p, counts, deltas):
    weights = [
      (tokens - tokens0) ** 2 / (steps - steps0)
      for (steps, tokens), (steps0, tokens0) in zip(
        counts, since[p], strict=True
      )
    ]
    for x in parts[p]:
      delta = merge(x, [d[x] for d in deltas], weights)
      b[x] = momentum * b[x] + delta
      theta[x] = theta[x] - lr * (delta + momentum * b[x])

  for t in range(1, steps + 1):
    for learner in learners:
      learner.step()
    if t % stride == 0:
      p = (t // stride - 1) % fragments
      flying[p] = (t + overlap, *capture(p))
    for p in [p for p, x in flying.items() if t in (x[0], steps)]:
      _, counts, deltas = flying.pop(p)
      anchor = {x: theta[x] for x in parts[p]}
      outer_step(p, counts, deltas)
      since[p] = [(z.steps, z.tokens) for z in learners] if forgets else counts
      for z, sent in zip(learners, deltas, strict=True):
        for x in parts[p]:
          z.params[x] = adopt(z.params[x], theta[x], anchor[x], sent[x])
  for p in range(fragments):  # the drain
    if any(z.steps > s for z, (s, _) in zip(learners, since[p], strict=True)):
      outer_step(p, *capture(p))
  return theta
