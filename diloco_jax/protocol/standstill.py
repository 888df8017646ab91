"""A syncer that stood still blames nobody for it (section 5.7).

A stopped process or a suspended machine wakes to a clock that has moved on:
by it every lease is over and every answer overdue, while what the islands sent
is still to be read. The time that it was away does not count.
"""

from diloco_jax.protocol.turn import Turn


def make_good(turn: Turn, away_s: float) -> None:
  """Move everything that others are waited for until by `away_s` seconds."""
  for index, island in list(turn.islands.items()):
    turn.island(
      index,
      lease_until=island.lease_until + away_s,
      state_since=island.state_since + away_s,
    )
  for round_id, rnd in list(turn.rounds.items()):
    turn.round(round_id, timeout_at=rnd.timeout_at + away_s)
  state = turn.get()
  turn.set(ends_at=state.ends_at + away_s)
  recovering = state.recovering
  if recovering is not None:
    fetching = {
      p: x._replace(since=x.since + away_s)
      for p, x in recovering.fetching.items()
    }
    turn.set(
      recovering=recovering._replace(
        since=recovering.since + away_s, fetching=fetching
      )
    )
  turn.note('stood_still', away_s=round(away_s, 3))
