"""`rose relay`: what is refused before it listens, and the key for workers."""

from __future__ import annotations

from rose.cli import main as cli


def said(capsys, *words: str, code: int = 0) -> str:
    assert cli.main(list(words)) == code
    out, err = capsys.readouterr()
    return out + err


def test_relay_up_without_a_folder_or_a_secret_says_so(capsys, monkeypatch):
    for name in ("ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert "needs a folder" in said(capsys, "relay", "up", code=2)
    assert "secret is not known" in said(capsys, "relay", "up", "--folder", "somewhere", code=2)


def test_the_key_for_workers_is_not_the_secret(tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_text("a secret that is long enough\n")
    secret.chmod(0o600)
    key = said(capsys, "relay", "key", "--secret-file", str(secret))
    assert key == said(capsys, "relay", "key", "--secret-file", str(secret))
    assert "long enough" not in key and len(key) > 20


def test_tls_needs_a_certificate_and_its_key(tmp_path, capsys):
    words = ["relay", "up", "--folder", str(tmp_path), "--certificate", "only.pem"]
    assert "both --certificate and --key" in said(capsys, *words, code=2)
