"""Corpora: what is read, what is held out, and mistakes in files."""

import hashlib
import json
import pathlib

from absl.testing import absltest

from diloco_jax.data import corpus
from diloco_jax.errors import UserError


class CorpusTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def problem(self, path):
    with self.assertRaises(UserError) as caught:
      corpus.load(str(path))
    (problem,) = caught.exception.problems
    self.assertIn(str(path), problem.where)
    return str(problem)

  def test_files_are_held_out_whole_and_the_split_stays(self):
    names = [f'sub{i % 3}/file{i}.txt' for i in range(120)]
    for name in names:
      file = self.folder / name
      file.parent.mkdir(exist_ok=True)
      file.write_text(f'<{name}>\n')
    loaded = corpus.load(str(self.folder))
    self.assertEqual(loaded.documents, 120)

    def held_out(name):
      digest = hashlib.sha256(name.encode()).hexdigest()
      return int(digest[:8], 16) % 100 < 4

    for split, wanted in ((loaded.test, True), (loaded.train, False)):
      inside = [f'<{n}>' for n in sorted(names) if held_out(n) == wanted]
      self.assertNotEmpty(inside)
      self.assertEqual(split.tobytes().decode().split(), inside)
    # More files move no other file to the other side.
    (self.folder / 'aaa_more.txt').write_text('<more>\n')
    corpus.load.cache_clear()
    again = corpus.load(str(self.folder))
    self.assertEqual(again.test.tobytes(), loaded.test.tobytes())
    self.assertNotEqual(again.sha256, loaded.sha256)

  def test_the_hash_is_that_of_the_bytes(self):
    file = self.folder / 'a.txt'
    file.write_bytes(b'some text, ' * 100)
    first = corpus.load(str(file))
    corpus.load.cache_clear()
    second = corpus.load(str(file))
    self.assertEqual(first.sha256, second.sha256)
    together = first.train.tobytes() + first.test.tobytes()
    self.assertEqual(first.sha256, hashlib.sha256(together).hexdigest())
    self.assertLen(together, 1100)

  def test_of_one_file_the_end_is_held_out(self):
    file = self.folder / 'a.txt'
    text = ''.join(f'{i:05d}\n' for i in range(5000))
    file.write_text(text)
    loaded = corpus.load(str(file))
    self.assertEqual(loaded.train.tobytes().decode(), text[:28800])
    self.assertEqual(loaded.test.tobytes().decode(), text[28800:])

  def test_few_documents_still_have_both_splits(self):
    # 'held0' is chosen so that its only document falls on either side.
    for held_out in (False, True):
      name = next(
        n
        for n in (f'doc{i}.txt' for i in range(1000))
        if corpus.is_held_out(n) == held_out
      )
      folder = self.folder / str(held_out)
      folder.mkdir()
      (folder / name).write_text('x' * 1000)
      loaded = corpus.load(str(folder))
      self.assertEqual((loaded.train.size, loaded.test.size), (960, 40))

  def test_jsonl(self):
    file = self.folder / 'a.jsonl'
    # U+2028 ends a line of Python's splitlines, and none of JSONL.
    texts = [f'text {i} ü \u2028 more' for i in range(200)]
    lines = [json.dumps({'text': t}, ensure_ascii=False) for t in texts]
    file.write_text('\n'.join(lines) + '\n\n', encoding='utf-8')
    loaded = corpus.load(str(file))
    self.assertEqual(loaded.documents, 200)
    both = (loaded.train.tobytes() + loaded.test.tobytes()).decode()
    for text in texts:
      self.assertIn(text, both)

  def test_hidden_files_are_left_out(self):
    (self.folder / 'a.txt').write_text('text ' * 50)
    for hidden in ('.git/config', 'sub/.binary'):
      file = self.folder / hidden
      file.parent.mkdir()
      file.write_bytes(b'\xff\xfe')
    self.assertEqual(corpus.load(str(self.folder)).documents, 1)

  def test_mistakes_are_told(self):
    missing = self.folder / 'missing.txt'
    self.assertIn('no such file', self.problem(missing))
    empty = self.folder / 'empty.txt'
    empty.touch()
    self.assertIn('no text', self.problem(empty))
    nothing = self.folder / 'nothing'
    nothing.mkdir()
    self.assertIn('no text', self.problem(nothing))
    binary = self.folder / 'binary.txt'
    binary.write_bytes(b'abc\xff')
    self.assertIn('byte 3 is not UTF-8', self.problem(binary))

  def test_every_wrong_file_is_told_at_once(self):
    (self.folder / 'fine.txt').write_text('text')
    for name in ('b.txt', 'a.txt'):
      (self.folder / name).write_bytes(b'\xff')
    (self.folder / 'c.jsonl').write_text('{}\n{"text": "fine"}\n3')
    with self.assertRaises(UserError) as caught:
      corpus.load(str(self.folder))
    found = [
      (pathlib.Path(p.where).name, p.got) for p in caught.exception.problems
    ]
    self.assertEqual(
      found[:2], [(n, 'byte 0 is not UTF-8') for n in ('a.txt', 'b.txt')]
    )
    self.assertEqual([name for name, _ in found[2:]], ['c.jsonl', 'c.jsonl'])
    self.assertStartsWith(found[2][1], 'line 1')
    self.assertStartsWith(found[3][1], 'line 3')

  def test_so_many_problems_and_no_more(self):
    file = self.folder / 'a.jsonl'
    file.write_text('{}\n' * 1000)
    with self.assertRaises(UserError) as caught:
      corpus.load(str(file))
    self.assertLen(caught.exception.problems, corpus.PROBLEMS_MAX)

  def test_wrong_jsonl_names_the_line(self):
    good = '{"text": "fine"}'
    for number, line in enumerate(
      ('{"text": ', '{"txt": "a"}', '["text"]', '{"text": 3}', '7')
    ):
      file = self.folder / f'{number}.jsonl'
      file.write_text('\n'.join([good, '', line, good]))
      self.assertIn('line 3', self.problem(file))

  def test_the_default_is_real_text_on_every_machine(self):
    corpus.load.cache_clear()
    with self.assertLogs(level='INFO') as logged:
      loaded = corpus.load()
    self.assertIn(loaded.sha256, logged.output[0])
    self.assertGreater(loaded.train.size, 5_000_000)
    self.assertGreater(loaded.test.size, 100_000)
    self.assertIn(b'def ', loaded.test.tobytes())


if __name__ == '__main__':
  absltest.main()
