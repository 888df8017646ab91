"""Which samples belong to whom, and what became of them (section 5.11).

Lane m of the data is leased to one incarnation of island m at a time, from
`begin` on. Samples up to the newest merged step of a dead incarnation are
spent; those after it go back to the lane and are the first of the next lease.
"""

from diloco_jax.protocol import syncer_state as s
from diloco_jax.protocol.turn import Turn


def newest_merged_step(turn: Turn, index: int, incarnation: int) -> int:
  """The newest inner step of an incarnation that is or will be in Θ; or -1.

  A closed round is merged whatever happens to its members.
  """
  steps = [-1]
  included = [piece.included for piece in turn.fragments]
  recovering = turn.get().recovering
  if recovering is not None:
    # What will be taken back is not known yet: what the tape has is spent.
    included = [made[-1].included for made in recovering.memory.history]
  for inside in included:
    own = inside.get(index)
    if own is not None and own.incarnation == incarnation:
      steps.append(own.step)
  for rnd in turn.rounds.values():
    if rnd.phase == s.COLLECTING:
      continue
    for member in rnd.contributed:
      if (member.island, member.incarnation) == (index, incarnation):
        assert member.contribution is not None
        steps.append(member.contribution.step)
  return max(steps)


def next_begin(turn: Turn, old: s.Island) -> int:
  """The first sample of the lease that follows that of a dead incarnation."""
  newest = newest_merged_step(turn, old.id, old.incarnation)
  spent = max(0, newest - old.first_step)
  return old.begin + spent * old.samples_per_step


def owed(turn: Turn, index: int, incarnation: int) -> bool:
  """Whether a closed round still holds work of an older incarnation.

  Its merge would bring back steps that a restored checkpoint holds as not yet
  merged, so the newer one may not train before it is over.
  """
  return any(
    member.island == index and member.incarnation < incarnation
    for rnd in turn.rounds.values()
    for member in rnd.contributed
  )
