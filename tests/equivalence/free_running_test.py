"""Free running, nobody waits: the number of steps is not known beforehand."""

import pathlib
import tempfile

from absl.testing import absltest
import numpy as np

from diloco_jax.launch import assembly
from diloco_jax.launch import results
from diloco_jax.launch import threads
from diloco_jax.telemetry import summary as summary_lib
from diloco_jax.telemetry import tape as tape_lib
from tests.equivalence import oracles
from tests.equivalence import toy

# Relative to the largest value of each tensor: f32 against f64 over S inner
# steps and as many adoptions, each of which rounds by 6e-8. S is some tens to
# a few hundreds, and a tenfold margin covers more.
TOLERANCE = 1e-5


class RebaseTest(absltest.TestCase):
  """With one island, η = 1 and μ = 0 nothing is merged but its own steps."""

  def setUp(self):
    super().setUp()
    self.task = toy.ToyTask()
    run = toy.configured(
      'decoupled_diloco',
      islands=1,
      steps=24,
      sync={'period': 6, 'fragments': 3, 'overlap': 2},
      outer={'lr': 1.0, 'momentum': 0.0},
    )
    self.assertEqual((run.sync.adopt, run.sync.mode), ('rebase', 'free'))
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    shapes = assembly.param_shapes(self.task, run.seed)
    results.make_folder(assembly.layout(run, shapes).run, folder)
    whole = threads.ThreadRun(run, self.task, folder, evaluate=False)
    whole.train()
    self.theta = toy.flat(whole.syncer.final_parameters())
    self.outcome = whole.outcomes[0]
    self.summary = summary_lib.summarize(folder, 'ok')
    self.tape = tape_lib.read_tape(
      folder / 'tape' / 'syncer.jsonl', events=False
    )
    self.plain = oracles.plain(self.task, self.outcome.steps)

  def test_no_step_is_lost(self):
    with self.subTest('the island holds plain training'):
      local = toy.flat(self.outcome.params)
      self.assertLess(toy.difference(local, self.plain[-1]), TOLERANCE)

    with self.subTest('each fragment of Θ is plain training up to its merge'):
      parts = oracles.split(self.theta, 3)
      merged = [0, 0, 0]
      for line in self.tape:
        if line['kind'] == 'merge':
          (entry,) = line['inputs']
          merged[line['fragment']] += entry[3]
      for part, steps in zip(parts, merged, strict=True):
        self.assertBetween(steps, 1, self.outcome.steps)
        self.assertLess(
          toy.difference(
            {x: self.theta[x] for x in part},
            {x: self.plain[steps][x] for x in part},
          ),
          TOLERANCE,
        )

    with self.subTest('the books say so'):
      per_step = toy.ROWS * toy.LENGTH
      sizes = [sum(self.theta[x].size for x in part) for part in parts]
      inside = np.dot(sizes, merged) / sum(sizes) * per_step
      trained = self.outcome.steps * per_step
      self.assertEqual(self.summary['tokens_lost'], 0)
      self.assertEqual(self.summary['tokens_trained'], trained)
      self.assertAlmostEqual(self.summary['tokens_merged'], inside, places=2)
      self.assertAlmostEqual(
        self.summary['tokens_pending'], trained - inside, places=2
      )


if __name__ == '__main__':
  absltest.main()
