"""Where compiled kernels go."""

from pathlib import Path

import pytest

from epcross.kernels import cache


def test_the_cache_lies_in_the_environment_or_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPCROSS_CACHE_DIR", str(tmp_path / "cache"))
    assert cache.cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("EPCROSS_CACHE_DIR")
    monkeypatch.setattr(cache.sys, "prefix", "/some/venv")
    monkeypatch.setattr(cache.sys, "base_prefix", "/usr")
    assert cache.cache_directory() == Path("/some/venv/var/cache/epcross")
    monkeypatch.setattr(cache.sys, "prefix", "/usr")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_directory() == Path("/xdg/epcross")
