"""TLS and mutual TLS over gRPC."""

import datetime
import ipaddress
import pathlib
import threading

from absl.testing import absltest
from absl.testing import parameterized
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
import grpc as grpc_library

from diloco_jax.errors import UserError
from diloco_jax.transport import base
from diloco_jax.transport import grpc
from tests.transport import ends
from tests.transport.grpc_case import GrpcCase

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
UNAUTHENTICATED = grpc_library.StatusCode.UNAUTHENTICATED


class Certificates:
  """An authority and certificates by it, as PEM files of a folder."""

  def __init__(self, folder):
    self._folder = pathlib.Path(folder)
    self._key = ec.generate_private_key(ec.SECP256R1())
    self._name = _name('authority')
    self.ca = self._write('ca', self._sign('authority', self._key, True))

  def issue(self, name):
    """Paths of a certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    secret = key.private_bytes(
      serialization.Encoding.PEM,
      serialization.PrivateFormat.PKCS8,
      serialization.NoEncryption(),
    )
    return (
      self._write(name, self._sign(name, key, False)),
      self._write(f'{name}_key', secret),
    )

  def _sign(self, name, key, is_authority):
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address('127.0.0.1'))
    builder = (
      x509.CertificateBuilder()
      .subject_name(_name(name))
      .issuer_name(self._name)
      .public_key(key.public_key())
      .serial_number(x509.random_serial_number())
      .not_valid_before(now - day)
      .not_valid_after(now + day)
      .add_extension(x509.BasicConstraints(is_authority, None), True)
      .add_extension(x509.SubjectAlternativeName([address]), False)
    )
    made = builder.sign(self._key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM)

  def _write(self, name, data):
    path = self._folder / f'{name}.pem'
    path.write_bytes(data)
    return str(path)


def _name(text):
  return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class TlsTest(GrpcCase):
  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.certificates = Certificates(self.folder)
    self.cert, self.key = self.certificates.issue('server')

  def credentials(self, ca):
    return grpc_library.ssl_channel_credentials(pathlib.Path(ca).read_bytes())

  def exchange(self, server, client):
    ends.one(client, base.PeerUp)
    peer = ends.one(server, base.PeerUp).peer
    payload = ends.payload(3 << 20)
    client.send(base.SYNCER, ends.contribution(), payload)
    server.send(peer, ends.broadcast(), payload)
    for end in (server, client):
      (item,) = ends.deliveries(end, 1)
      self.assertEqual(ends.as_bytes(item.payload), ends.as_bytes(payload))

  def refused(self, server, credentials):
    raw = self.raw(server, credentials=credentials)
    for call in raw.calls.values():
      self.assertEqual(call.code(), grpc_library.StatusCode.UNAVAILABLE)
    self.assertEqual(server.receive(0), [])

  def test_tls(self):
    server = self.serve(tls_cert=self.cert, tls_key=self.key)
    client = self.connect(server.address, tls_ca=self.certificates.ca)
    self.exchange(server, client)

  def test_tls_is_not_left_out(self):
    server = self.serve(tls_cert=self.cert, tls_key=self.key)
    self.refused(server, None)

  def test_another_authority_is_not_trusted(self):
    server = self.serve(tls_cert=self.cert, tls_key=self.key)
    other = Certificates(self.create_tempdir('other').full_path)
    self.refused(server, self.credentials(other.ca))

  def test_mutual_tls(self):
    authority = self.certificates
    server = self.serve(
      tls_cert=self.cert,
      tls_key=self.key,
      tls_ca=authority.ca,
      mutual_tls=True,
    )
    cert, key = authority.issue('island')
    client = self.connect(
      server.address,
      tls_ca=authority.ca,
      tls_cert=cert,
      tls_key=key,
      mutual_tls=True,
    )
    self.exchange(server, client)
    self.refused(server, self.credentials(authority.ca))

  def test_no_setting_is_silently_plain_text(self):
    """A client that shows its token to whoever listens."""
    server = self.serve()
    for files in (
      {'tls_cert': self.cert, 'tls_key': self.key},
      {'tls_ca': self.certificates.ca},
    ):
      tried = threading.Event()

      class Rng:
        def uniform(self, low, high, tried=tried):
          del high
          tried.set()
          return low

      options = base.TransportOptions(**files)
      client = grpc.connect(server.address, ends.TOKEN, options, rng=Rng())
      self.addCleanup(ends.in_thread, client.close)
      self.assertTrue(tried.wait(ends.TIMEOUT_S))
      self.assertIn('UNAVAILABLE', client.trouble)
      self.assertEqual(client.receive(0), [])
    for files in ({'tls_ca': self.certificates.ca}, {'tls_key': self.key}):
      with self.assertRaisesRegex(UserError, 'tls_cert: got nothing'):
        self.serve(**files)

  def test_files_that_do_not_do(self):
    garbage = pathlib.Path(self.folder) / 'garbage.pem'
    garbage.write_text('-----BEGIN CERTIFICATE-----\nnone\n')
    _, other_key = self.certificates.issue('other')
    for files, told in (
      ({'tls_cert': str(garbage), 'tls_key': self.key}, 'garbage.pem'),
      ({'tls_cert': self.cert, 'tls_key': other_key}, 'tls_cert and its key'),
      ({'tls_cert': self.cert, 'tls_key': self.cert}, 'tls_cert and its key'),
    ):
      with self.assertRaisesRegex(UserError, told):
        self.serve(**files)
      with self.assertRaisesRegex(UserError, told):
        self.connect(
          '127.0.0.1:1',
          tls_ca=self.certificates.ca,
          mutual_tls=True,
          **files,
        )
    with self.assertRaisesRegex(UserError, 'tls_ca.*garbage.pem'):
      self.connect('127.0.0.1:1', tls_ca=str(garbage))

  @parameterized.parameters('tls_cert', 'tls_key', 'tls_ca')
  def test_mutual_tls_wants_three_files(self, left_out):
    files = {
      'tls_cert': self.cert,
      'tls_key': self.key,
      'tls_ca': self.certificates.ca,
    }
    for value, told in (('', f'{left_out}: got nothing'), ('/no', '/no')):
      options = base.TransportOptions(
        **{**files, left_out: value}, mutual_tls=True
      )
      with self.assertRaisesRegex(UserError, told):
        grpc.serve('127.0.0.1:0', ends.TOKEN, options)
      with self.assertRaisesRegex(UserError, told):
        ends.connect('127.0.0.1:1', options=options)


if __name__ == '__main__':
  absltest.main()
