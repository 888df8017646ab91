"""Virtual time: order, and random streams that do not disturb each other."""

from absl.testing import absltest

from diloco_jax.simulation.kernel import Kernel


class KernelTest(absltest.TestCase):
  def test_order_of_time_then_of_scheduling(self):
    kernel, seen = Kernel(0), []
    for name, at in (('c', 2.0), ('a', 1.0), ('b', 1.0), ('d', 2.0)):
      kernel.at(at, lambda x=name: seen.append((kernel.now, x)))
    self.assertEqual(kernel.run(10.0), 4)
    self.assertEqual(seen, [(1.0, 'a'), (1.0, 'b'), (2.0, 'c'), (2.0, 'd')])

  def test_the_past_is_now(self):
    kernel, seen = Kernel(0), []
    kernel.at(5.0, lambda: kernel.at(1.0, lambda: seen.append(kernel.now)))
    kernel.run(10.0)
    self.assertEqual(seen, [5.0])

  def test_until_is_included_and_the_rest_stays(self):
    kernel, seen = Kernel(0), []
    kernel.at(1.0, lambda: seen.append(1))
    kernel.at(1.5, lambda: seen.append(2))
    self.assertEqual(kernel.run(1.0), 1)
    self.assertEqual(kernel.run(2.0), 1)
    self.assertEqual(seen, [1, 2])

  def test_a_run_without_an_end_is_stopped(self):
    kernel = Kernel(0)

    def again():
      kernel.after(0.0, again)

    again()
    with self.assertRaisesRegex(RuntimeError, 'more than 100'):
      kernel.run(1.0, events_max=100)

  def test_streams_are_named(self):
    first, second = Kernel(7), Kernel(7)
    second.stream('other').random()
    draws = [first.stream('x').random() for _ in range(2)]
    self.assertEqual(draws[0], second.stream('x').random())
    self.assertEqual(draws[0], draws[1])  # a stream starts anew each time
    self.assertNotEqual(draws[0], first.stream('y').random())
    self.assertNotEqual(draws[0], Kernel(8).stream('x').random())


if __name__ == '__main__':
  absltest.main()
