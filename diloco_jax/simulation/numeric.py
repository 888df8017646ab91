"""Numeric mode: real arrays, merges, codecs and adoptions, on a toy model.

Islands keep their anchors and the syncer its Θ in the classes of production;
only the inner step is a toy: step s of life l adds an increment that follows
from l and s alone. So it is known what every array must hold.
"""

import functools
import random
from typing import Any

import jax
import numpy as np

from diloco_jax import algorithm as A
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol import settings as settings_lib
from diloco_jax.simulation import arrays
from diloco_jax.simulation import swarm
from diloco_jax.simulation.books import Books
from diloco_jax.simulation.checking import CORRECTNESS
from diloco_jax.simulation.checking import CheckFailure
from diloco_jax.simulation.checking import Observer
from diloco_jax.simulation.coverage import Tally
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.transport import base as transport

SHAPES = {
  'embed': (4, 3), 'first': (3, 5), 'bias': (5,), 'second': (5, 2),
  'scale': (2,), 'head': (7,),
}  # fmt: skip
FRAGMENTS = (1, 2, 3, 6)
TOKENS = 100  # in a batch
# f32 sums of some hundred increments, added and subtracted in another order.
TOLERANCE = {'f32': 1e-4, 'bf16': 0.02}
ULP = 1e-6  # some units in the last place of f32


def start_params() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
  }


@functools.cache
def directions() -> dict[str, np.ndarray]:
  """Into which steps go: one array for each tensor."""
  rng = np.random.default_rng(1)
  return {
    name: rng.uniform(0.5, 1.5, size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
  }


def increment(life: int, step: int) -> float:
  """How far step `step` of a process goes along the directions."""
  return ((7 * life + 13 * step) % 11 - 4) * 0.01


class ToyTrainer:
  """The inner training of one process."""

  def __init__(self, life: int):
    self._life = life
    self.extra: dict[str, Any] = {'moments': np.zeros(3, np.float32)}

  def put(self, params: Any) -> Any:
    return jax.tree.map(np.array, params)

  def begin(self, start: m.Start) -> None:
    pass

  def step(self, params: Any, step: int) -> tuple[Any, int, float | None]:
    by = np.float32(increment(self._life, step))
    moved = {
      name: np.asarray(x) + by * directions()[name]
      for name, x in params.items()
    }
    return moved, TOKENS, None


def draw(seed: int) -> Scenario:
  """As the timing seed, for the toy model and fewer islands."""
  scenario = swarm.draw(seed)
  rng = random.Random(f'numeric/{seed}')
  count = rng.choice(FRAGMENTS)
  old = scenario.settings
  stride = min(old.stride, 3)
  period = stride * count
  islands = min(old.islands, 4)
  part = partition(count)
  overlap = old.overlap
  if old.mode != settings_lib.FREE:
    overlap = min(overlap, period - 1)
  return swarm.resized(
    scenario,
    islands=islands,
    sizes=part.sizes,
    fingerprint=part.fingerprint,
    period=period,
    overlap=overlap,
    quorum=min(old.quorum, islands),
    steps=max(200 // islands, 6 * period),
  )


@functools.cache
def partition(fragments: int) -> A.Partition:
  return A.partition(
    {
      name: jax.ShapeDtypeStruct(shape, np.float32)
      for name, shape in SHAPES.items()
    },
    fragments,
  )


@functools.cache
def _merges(fragments: int, rule: str) -> tuple[Any, tuple[Any, ...]]:
  """One optimizer and one compilation for all seeds of a kind."""
  tx = A.outer_optimizer(0.7, 0.5)
  part = partition(fragments)
  made = A.make_merge(tx, dict(part.is_embedding), rule=rule)
  return tx, (made,) * fragments


class ToyContents(arrays.Contents):
  """Arrays of the toy model for a whole world."""

  def __init__(self, scenario: Scenario):
    rng = random.Random(f'codecs/{scenario.seed}')
    fragments = scenario.settings.fragments
    rule = rng.choice(['mean', 'rda'])
    tx, merges = _merges(fragments, rule)
    super().__init__(
      partition(fragments),
      alpha=0.5,
      upload=rng.choice(['f32', 'bf16']),
      download=rng.choice(['f32', 'bf16']),
      tx=tx,
      rule=rule,
      merges=merges,
      islands=4,
      start=start_params,
    )

  def trainer(self, life: int) -> ToyTrainer:
    return ToyTrainer(life)


class ValuesAreTrue(Observer):
  """An observer: Δ is the sum of the steps that the books say are in it.

  Holds for rebase and overwrite. Blending keeps a share of what was merged, of
  which nobody keeps account.
  """

  def __init__(self, contents: ToyContents, books: Books, adopt: str):
    self._contents = contents
    self._books = books
    self._adopt = adopt
    self.checked = 0

  def on_react(
    self,
    world: Any,
    who: str,
    life: int,
    old: Any,
    event: Any,
    new: Any,
    actions: tuple[a.Action, ...],
  ) -> None:
    del world, old, actions, life
    if not isinstance(event, a.Encoded) or self._adopt == settings_lib.BLEND:
      return
    key = new.island, new.incarnation, event.fragment, event.capture.number
    given = self._books.given.get(key)
    encoded = self._contents.encoded.pop((who, event.capture, event.fragment))
    if given is None:
      return
    total = sum(
      increment(self._books.lives[number].life, step)
      for number, after, upto in given.spans
      for step in range(after + 1, upto + 1)
    )
    self._compare(who, event.fragment, encoded, total)

  def _compare(
    self,
    who: str,
    fragment: int,
    encoded: tuple[transport.Payload, float],
    total: float,
  ) -> None:
    payload, largest = encoded
    part = self._contents.partition
    delta = A.decode(
      A.from_buffers(part.specs(fragment), payload.kind, payload.buffers)
    )
    # Keys are paths of the parameters; the toy's are one level deep.
    for name, got in delta.items():
      want = -total * directions()[_plain(name)]
      # Δ is a difference of values as large as these: an outlier that came
      # before there were norms to compare it with makes them large.
      bound = TOLERANCE[payload.kind] * (1.0 + np.abs(want)) + ULP * largest
      if not np.all(np.abs(np.asarray(got) - want) <= bound):
        raise CheckFailure(
          CORRECTNESS,
          type(self).__name__,
          f'{who} gives {float(np.ravel(got)[0]):.5f} of fragment {fragment}; '
          f'its steps make {float(np.ravel(want)[0]):.5f}',
        )
    self.checked += 1


def _plain(path: str) -> str:
  return ''.join(x for x in path if x.isalpha())


def run_seed(
  seed: int,
  tally: Tally | None = None,
  *,
  observers: tuple[Any, ...] = (),
) -> swarm.Outcome:
  """The scenario of a seed, with arrays."""
  scenario = draw(seed)
  contents = ToyContents(scenario)
  return swarm.run(
    scenario,
    tally,
    contents=contents,
    observers=observers,
    watch=lambda books: ValuesAreTrue(contents, books, scenario.settings.adopt),
  )
