"""gRPC: the other end is a process of its own that dies or stands still."""

import os
import pathlib
import signal
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.transport import base
from tests.transport import ends

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = base.TransportOptions(keepalive_s=0.5)


class ProcessesTest(parameterized.TestCase):
  def start_process(self, *args):
    process = subprocess.Popen(
      [sys.executable, '-m', 'tests.transport.peer_companion', *args],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.addCleanup(process.stdout.close)
    self.addCleanup(process.stdin.close)
    self.addCleanup(process.wait, ends.TIMEOUT_S)
    self.addCleanup(process.kill)
    return process

  def start(self, role):
    """The end in this process, its peer, and the other process."""
    if role == 'client':
      end = ends.Grpc(OPTIONS).server
      process = self.start_process('client', end.address)
    else:
      process = self.start_process('server')
      address = process.stdout.readline().strip()
      end = ends.connect(address, options=OPTIONS)
    self.addCleanup(ends.in_thread, end.close)
    peer = ends.one(end, base.PeerUp).peer
    self.assertEqual(process.stdout.readline(), 'up\n')
    return end, peer, process

  @parameterized.product(
    role=('client', 'server'), how=(signal.SIGKILL, signal.SIGSTOP)
  )
  def test_death_and_standstill_are_noticed(self, role, how):
    end, peer, process = self.start(role)
    os.kill(process.pid, how)
    down = ends.one(end, base.PeerDown)
    self.assertEqual(down.peer, peer)
    self.assertRegex(down.reason, '^connection lost')
    message = ends.closed() if role == 'client' else ends.report()
    self.assertFalse(end.send(peer, message))

  @parameterized.parameters('client', 'server')
  def test_death_amid_a_transfer(self, role):
    end, peer, process = self.start(role)
    payload = ends.payload(64 << 20)
    for _ in range(4):
      sends = ends.broadcast() if role == 'client' else ends.contribution()
      self.assertTrue(end.send(peer, sends, payload))
      process.stdin.write('bulk\n')
    process.stdin.flush()
    self.assertEqual(ends.one(end, base.Delivery).payload.nbytes, 64 << 20)
    process.kill()
    self.assertEqual(ends.one(end, base.PeerDown).peer, peer)

  @parameterized.parameters('client', 'server')
  def test_closing_beside_one_that_stands_still(self, role):
    end, peer, process = self.start(role)
    os.kill(process.pid, signal.SIGSTOP)
    sends = ends.broadcast() if role == 'client' else ends.contribution()
    self.assertTrue(end.send(peer, sends, ends.payload(64 << 20)))
    ends.in_thread(end.close)

  @parameterized.parameters('client', 'server')
  def test_a_process_can_end_without_closing(self, role):
    _, _, process = self.start(role)
    process.stdin.write('leave\n')
    process.stdin.flush()
    self.assertEqual(process.wait(ends.TIMEOUT_S), 0)


if __name__ == '__main__':
  absltest.main()
