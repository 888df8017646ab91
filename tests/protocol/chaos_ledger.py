"""An account of all work, kept apart from the machines that it watches.

A fragment's value is told as the set of inner steps that are in it. Θ grows
by what a merge adds, an island's local value by its steps, and adopting does
to these sets what it does to the arrays. Blending is told as rebasing: the
rules count it alike.
"""

from collections import defaultdict


def tokens_of(step):
  """Tokens of one inner step; uneven, so that a mix-up shows."""
  return 40 + step % 7


class Theta:
  """The syncer's side: which step entered which fragment at which version."""

  def __init__(self, sizes, incarnation=1):
    self.sizes = sizes
    self.versions = [(incarnation, 0)] * len(sizes)
    self.entered = [{} for _ in sizes]  # (island, inc, step) -> version
    self.captures = {}  # (island, inc, fragment, number) -> steps
    self.merged = defaultdict(int)  # (island, inc) -> token_params
    self.lines = 0

  def add(self, line, deltas):
    """A tape line and the payloads that its merge was made of."""
    p = line['fragment']
    parent, version = tuple(line['parent']), tuple(line['version'])
    assert parent == self.versions[p], f'parent {parent} of {version}'
    assert version == (parent[0], parent[1] + 1), f'{parent} -> {version}'
    assert line['inputs'], 'a merge of nothing'
    islands = [x[0] for x in line['inputs']]
    assert islands == sorted(set(islands)), f'inputs {islands}'
    assert len(deltas) == len(islands)
    for entry, delta in zip(line['inputs'], deltas, strict=True):
      island, incarnation, number, c_steps, c_tokens, weight, *_ = entry
      steps = self.captures[island, incarnation, p, number]
      assert delta == (island, incarnation, p, number), f'{delta} {entry}'
      assert c_steps == len(steps) > 0, f'{entry}: {sorted(steps)}'
      assert c_tokens == sum(map(tokens_of, steps)), f'{entry}'
      assert weight == c_tokens**2 / c_steps, f'{entry}'
      for step in sorted(steps):
        key = (island, incarnation, step)
        assert key not in self.entered[p], (
          f'step {step} of island {island}.{incarnation} entered fragment {p}'
          f' at {self.entered[p][key]} and at {version}'
        )
        self.entered[p][key] = version
      self.merged[island, incarnation] += c_tokens * self.sizes[p]
    self.versions[p] = version
    self.lines += 1

  def steps_in(self, p, island, incarnation, version):
    """Steps of one incarnation that a version of a fragment holds."""
    return {
      key[2]
      for key, at in self.entered[p].items()
      if key[:2] == (island, incarnation) and at <= version
    }


class Local:
  """An island's side: the steps in local - anchor, and in its captures."""

  def __init__(self, theta, fragments):
    self.theta = theta
    self.pending = [set() for _ in range(fragments)]
    self.anchor = [None] * fragments
    self.captures = [{} for _ in range(fragments)]
    self.trained = 0  # steps
    self.trained_tokens = 0

  def step(self, number):
    self.trained += 1
    self.trained_tokens += tokens_of(number)
    for pending in self.pending:
      pending.add(number)

  def adopt(self, p, version, mode, inside, who):
    """Do to the sets what the driver does to the arrays."""
    assert self.anchor[p] is None or version > self.anchor[p], 'older version'
    if mode == 'overwrite':
      self.pending[p].clear()
    else:
      assert inside <= self.pending[p], 'takes back what is not there'
      self.pending[p] -= inside
    self.anchor[p] = tuple(version)
    twice = self.pending[p] & self.theta.steps_in(p, *who, self.anchor[p])
    assert not twice, (
      f'island {who[0]}.{who[1]} adopted {tuple(version)} of fragment {p} and'
      f' still offers steps {sorted(twice)} that are in it'
    )

  def capture(self, p, capture, who):
    assert len(self.captures[p]) < 1, 'two captures of a fragment'
    steps = frozenset(self.pending[p])
    self.captures[p][capture] = steps
    self.theta.captures[(*who, p, capture.number)] = steps

  def drop(self, p, capture):
    del self.captures[p][capture]
