"""What an island is told that does not fit the run, in one line each."""

import pathlib
import threading

from absl.testing import absltest

from diloco_jax import config as config_lib
from diloco_jax import config_json
from diloco_jax.errors import UserError
from diloco_jax.launch import assembly
from diloco_jax.launch import connecting
from diloco_jax.launch import joining
from diloco_jax.launch import results
from diloco_jax.launch import role
from diloco_jax.launch.syncing import Syncer
from diloco_jax.protocol import messages as m
from diloco_jax.runtime.clock import RealClock
from diloco_jax.transport import base as transport
from diloco_jax.transport import grpc

TOKEN = 'right'


class JoiningTest(absltest.TestCase):
  """A syncer that nobody has joined yet."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    config = config_lib.default_config()
    config.islands = 2
    config.model.width, config.model.depth, config.model.heads = 16, 1, 2
    config.sync.fragments, config.sync.period = 2, 2
    config.metrics.tensorboard = False
    cls.folder = pathlib.Path(absltest.get_default_test_tmpdir()) / 'joining'
    run = config_lib.resolve(config)
    task = assembly.make_task(run)
    planned = assembly.layout(run, assembly.param_shapes(task, run.seed))
    cls.run_config = planned.run
    cls.task = task
    results.make_folder(planned.run, cls.folder)
    endpoint = grpc.serve('127.0.0.1:0', TOKEN)
    cls.address = endpoint.address
    cls.syncer = Syncer(
      planned,
      task,
      workdir=cls.folder,
      endpoint=endpoint,
      clock=RealClock(role.started_wall_s(cls.folder)),
    )
    cls.thread = threading.Thread(target=cls.syncer.run)
    cls.thread.start()

  @classmethod
  def tearDownClass(cls):
    cls.syncer.stop('interrupted')
    cls.thread.join()
    super().tearDownClass()

  def token_file(self, text):
    return pathlib.Path(self.create_tempfile(content=text).full_path)

  def problems(self, *args, **kwargs):
    with self.assertRaises(UserError) as caught:
      joining.join(self.address, *args, **kwargs)
    return str(caught.exception)

  def test_wrong_token(self):
    told = self.problems(self.token_file('wrong'))
    self.assertIn('token was refused', told)

  def test_missing_token(self):
    told = self.problems(pathlib.Path('/nowhere/token'))
    self.assertIn('--token_file=/nowhere/token', told)

  def test_empty_token_file(self):
    self.assertIn('an empty file', self.problems(self.token_file('\n')))

  def test_run_fields_that_differ_are_named_all_at_once(self):
    told = self.problems(
      self.token_file(TOKEN),
      given=(('seed', '5'), ('inner.lr', '7'), ('data.batch', '4')),
    )
    lines = told.splitlines()
    self.assertLen(lines, 2)
    self.assertIn('--config.seed: got 5; expected 0', lines[0])
    self.assertIn('--config.inner.lr', lines[1])

  def test_a_mesh_that_does_not_fit_this_island(self):
    told = self.problems(self.token_file(TOKEN), given=(('mesh.fsdp', '3'),))
    self.assertIn('mesh: got', told)

  def hello(self, **changes):
    """The answer to a hello with something wrong in it."""
    endpoint = connecting.open_endpoint(
      self.address, TOKEN, transport.TransportOptions()
    )
    self.addCleanup(endpoint.close)
    connecting.ask_config(endpoint, address=self.address)
    planned = assembly.layout(
      self.run_config, assembly.param_shapes(self.task, 0)
    )
    fields = {
      'protocol_version': m.PROTOCOL_VERSION,
      'role': m.ISLAND,
      'island': -1,
      'nonce': str(changes),
      'fingerprint': planned.settings.fingerprint,
      'config_hash': planned.settings.config_hash,
    }
    endpoint.send(transport.SYNCER, m.Hello(**(fields | changes)))
    while True:
      for item in endpoint.receive(60):
        if isinstance(item, transport.Delivery):
          return item.message

  def test_refusals_of_the_protocol(self):
    for changes, reason, told in (
      ({'protocol_version': 99}, 'protocol_version', 'version 99'),
      ({'fingerprint': 'other'}, 'layout', 'model, dtypes or fragments'),
      ({'config_hash': 'other'}, 'config_hash', 'configuration'),
      ({'island': 2}, 'index', 'expected below 2'),
      ({'versions': (m.Version(1, 0),), 'digests': ('x',)}, 'versions', '2'),
    ):
      with self.subTest(reason):
        answer = self.hello(**changes)
        self.assertIsInstance(answer, m.Refusal)
        self.assertEqual(answer.reason, reason)
        self.assertIn(told, answer.detail)

  def test_a_refused_island_says_so_in_one_line(self):
    told = str(connecting.refused('layout', 'model differs'))
    self.assertLen(told.splitlines(), 1)

  def test_the_configuration_travels_whole(self):
    endpoint = connecting.open_endpoint(
      self.address, TOKEN, transport.TransportOptions()
    )
    self.addCleanup(endpoint.close)
    run = connecting.ask_config(endpoint, address=self.address)
    self.assertEqual(
      config_json.to_json(run), config_json.to_json(self.run_config)
    )

  def test_nobody_at_the_address(self):
    endpoint = connecting.open_endpoint(
      '127.0.0.1:1', TOKEN, transport.TransportOptions()
    )
    self.addCleanup(endpoint.close)
    with self.assertRaisesRegex(UserError, 'no answer within'):
      connecting.ask_config(endpoint, address='127.0.0.1:1', timeout_s=0.5)


if __name__ == '__main__':
  absltest.main()
