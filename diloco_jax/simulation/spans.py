"""Sets of inner steps, as few tuples: (life, after, upto) is after < s <= upto.

A life is one start of one island's process: the steps that two starts make
are different steps, whatever their numbers and incarnations.
"""

Span = tuple[int, int, int]
Spans = tuple[Span, ...]


def count(spans: Spans) -> int:
  total = 0
  for _, after, upto in spans:
    total += upto - after
  return total


def covers(spans: Spans, other: Spans) -> bool:
  """Whether all steps of `other` are in `spans`."""
  if set(spans) >= set(other):
    return True
  return count(without(spans, other)) == count(spans) - count(other)


def without(spans: Spans, gone: Spans) -> Spans:
  """What is left; `gone` may hold steps that are not there."""
  for life, after, upto in gone:
    left = []
    for span in spans:
      if span[0] != life or upto <= span[1] or after >= span[2]:
        left.append(span)
        continue
      if span[1] < after:
        left.append((life, span[1], after))
      if upto < span[2]:
        left.append((life, upto, span[2]))
    spans = tuple(left)
  return spans
