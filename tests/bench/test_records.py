"""Which commit a record says it is from."""

import shutil
import subprocess

import pytest

from tilewise.bench import records


def commit() -> str | None:
    return records.environment("", "", "cpu", (), {})["commit"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, in which the package seems to lie."""
    monkeypatch.delenv("COMMIT", raising=False)
    file = tmp_path / "records.py"
    file.write_text("one\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(records, "__file__", str(file))
    return file


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_files_that_differ_from_the_commit_show(repository):
    clean = commit()
    assert len(clean) == 12
    repository.write_text("two\n")
    assert commit() == f"{clean}-dirty"


def test_a_copy_says_what_it_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))
    monkeypatch.setenv("COMMIT", "0123456789abcdef")
    assert commit() == "0123456789ab"
    monkeypatch.delenv("COMMIT")
    assert commit() is None
