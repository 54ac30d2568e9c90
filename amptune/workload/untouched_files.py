"""Keeps files as they are while a script runs to be tuned: what it writes goes to a scratch folder, which it reads.

`torch.save` writes in C++, and safetensors in Rust, so that no audit hook sees them; and another working directory
would break what the script reads. So Python's own functions that write are replaced, for the script's code alone.
"""

from __future__ import annotations

import builtins
import errno
import getpass
import importlib.util
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

__all__ = ["OFFLINE", "UntouchedFiles"]

# Trackers and hubs that are asked, by their own variables, to send nothing.
OFFLINE = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DVCLIVE_TEST": "1",
    "MLFLOW_TRACKING_URI": "",  # a folder in the scratch one
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CODECARBON_OFFLINE_MODE": "1",
}
# What libraries keep for later runs is theirs to write: caches of compilers, downloads.
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
_CACHE_FOLDERS = ("~/.cache", "~/.triton", "~/.nv", "~/.config/matplotlib")
_WRITES = frozenset("wax+")
_REMOVING = ("remove", "unlink", "rmdir")
_MOVING = ("rename", "replace", "link", "symlink")


class UntouchedFiles:
    """Redirects what code writes while `is_users` is true of it; it deletes and renames redirected files alone.

    What is written lies in a folder within `scratch`, by default that of the system for temporary files.
    """

    def __init__(self, is_users: Callable[[], bool], scratch: Path | None = None) -> None:
        self._is_users = is_users
        self._folder = Path(tempfile.mkdtemp(prefix="amptune-script-", dir=scratch)).resolve()
        own = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        inductor = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        self._allowed = [Path(one).expanduser().resolve() for one in (*own, *_CACHE_FOLDERS, inductor)]
        self._allowed += [self._folder, Path("/dev"), Path("/proc")]
        self._before: list[tuple[Any, str, Any]] = []
        self._gone: set[str] = set()
        self._own_stat = os.stat

    def __enter__(self) -> Self:
        os.environ.update(OFFLINE, MLFLOW_TRACKING_URI=(self._folder / "mlruns").as_uri())
        opened = self._opener(builtins.open)
        for owner in (builtins, io):
            self._replace(owner, "open", opened)
        self._replace(os, "open", self._os_opener(os.open))
        self._replace(torch, "save", self._saver(torch.save, place=1, name="f"))
        self._replace(torch, "load", self._reader(torch.load))
        for name in _REMOVING:
            self._replace(os, name, self._remover(getattr(os, name)))
        self._replace(shutil, "rmtree", self._remover(shutil.rmtree))
        for name in _MOVING:
            self._replace(os, name, self._mover(getattr(os, name), leaves=name in ("link", "symlink")))
        self._replace(os, "mkdir", self._maker(os.mkdir))
        for name in ("chmod", "utime", "truncate"):
            self._replace(os, name, self._changer(getattr(os, name)))
        for name in ("stat", "lstat", "access"):
            self._replace(os, name, self._reader(getattr(os, name)))
        self._replace(os, "listdir", self._lister(os.listdir))
        self._replace(os, "scandir", self._scanner(os.scandir))
        if importlib.util.find_spec("safetensors") is not None:
            module = importlib.import_module("safetensors.torch")  # whose save_file calls this, however imported
            self._replace(module, "serialize_file", self._saver(module.serialize_file, 1, "filename"))
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            owner, name, own = self._before.pop()
            setattr(owner, name, own)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _is_led(self, path: Any) -> bool:
        """Returns True for a path that is the user's, and no cache."""
        if not self._is_users() or not isinstance(path, str | bytes | os.PathLike):
            return False
        absolute = Path(os.path.abspath(os.fsdecode(path)))
        if sys._getframe(2).f_globals.get("__name__") == "tempfile":
            self._allowed.append(absolute)
        return not any(absolute.is_relative_to(one) for one in self._allowed)

    def _scratch(self, path: Any) -> Path:
        absolute = Path(os.path.abspath(os.fsdecode(path)))
        return self._folder / absolute.relative_to(absolute.anchor)

    def _is_written(self, path: Any) -> bool:
        return os.path.lexists(self._scratch(path))

    def _was_deleted(self, path: Any) -> bool:
        """Returns True for what the script has deleted, or moved, alone or with a folder that it is in."""
        absolute = os.path.abspath(os.fsdecode(path))
        return any(f"{absolute}/".startswith(f"{one}/") for one in self._gone)

    def _is_gone(self, path: Any) -> bool:
        return self._was_deleted(path) and not self._is_written(path)

    def _place(self, path: Any) -> Any:
        """Returns where the script finds a path: what it wrote, or what is there."""
        return str(self._scratch(path)) if self._is_written(path) or self._is_gone(path) else path

    def _for_writing(self, path: Any, *, keeps: bool) -> str:
        """Returns the place for what is written; it begins with what stands there if the writer `keeps` that."""
        scratch = self._scratch(path)
        if keeps and not self._is_written(path) and not self._is_gone(path):
            if os.path.isdir(path):
                shutil.copytree(path, scratch)
            elif os.path.isfile(path):
                os.makedirs(scratch.parent, exist_ok=True)
                shutil.copyfile(path, scratch)
        if os.path.isdir(os.path.dirname(os.path.abspath(os.fsdecode(path)))):  # else opening says that it is missing
            os.makedirs(scratch.parent, exist_ok=True)
        return str(scratch)

    def _opener(self, own: Any) -> Any:
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if self._is_led(file):
                writes = bool(_WRITES & set(mode))
                file = self._for_writing(file, keeps="w" not in mode) if writes else self._place(file)
            return own(file, mode, *args, **kwargs)

        return open

    def _os_opener(self, own: Any) -> Any:
        def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if kwargs.get("dir_fd") is None and self._is_led(path):
                writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                path = self._for_writing(path, keeps=not flags & os.O_TRUNC) if writes else self._place(path)
            return own(path, flags, *args, **kwargs)

        return open

    def _saver(self, own: Any, place: int, name: str) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            given = [*args]
            path = kwargs[name] if name in kwargs else given[place] if len(given) > place else None
            if self._is_led(path):
                scratch = self._for_writing(path, keeps=False)
                if name in kwargs:
                    kwargs[name] = scratch
                else:
                    given[place] = scratch
            return own(*given, **kwargs)

        return save

    def _maker(self, own: Any) -> Any:
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None and self._is_led(path):
                if os.path.isdir(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                path = self._for_writing(path, keeps=False)
            return own(path, *args, **kwargs)

        return mkdir

    def _remover(self, own: Any) -> Any:
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or not self._is_led(path):
                return own(path, *args, **kwargs)
            is_theirs = os.path.lexists(path) and not self._is_written(path)
            if not is_theirs:
                own(str(self._scratch(path)), *args, **kwargs)
            self._gone.add(os.path.abspath(os.fsdecode(path)))
            return None

        return remove

    def _mover(self, own: Any, *, leaves: bool) -> Any:
        def move(source: Any, target: Any, **kwargs: Any) -> Any:
            if not (self._is_led(source) or self._is_led(target)):
                return own(source, target, **kwargs)
            result = own(self._for_writing(source, keeps=True), self._for_writing(target, keeps=False), **kwargs)
            if not leaves:
                self._gone.add(os.path.abspath(os.fsdecode(source)))
            return result

        return move

    def _changer(self, own: Any) -> Any:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            led = kwargs.get("dir_fd") is None and self._is_led(path)
            return own(self._for_writing(path, keeps=True) if led else path, *args, **kwargs)

        return change

    def _reader(self, own: Any) -> Any:
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            led = kwargs.get("dir_fd") is None and self._is_led(path)
            return own(self._place(path) if led else path, *args, **kwargs)

        return read

    def _own_is_dir(self, path: Any) -> bool:
        try:
            return stat.S_ISDIR(self._own_stat(path).st_mode)
        except OSError:
            return False

    def _both(self, path: Any) -> list[Any]:
        """Returns the folders that the script finds in one place: what it wrote, and what is there."""
        folders = [str(self._scratch(path)), *([] if self._was_deleted(path) else [path])]
        return [one for one in folders if self._own_is_dir(one)]

    def _lister(self, own: Any) -> Any:
        def listdir(path: Any = ".") -> Any:
            folders = self._both(path) if self._is_led(path) else []
            if not folders:
                return own(self._place(path) if self._is_led(path) else path)
            names = dict.fromkeys(name for one in folders for name in own(one))
            return [name for name in names if not self._is_gone(os.path.join(path, name))]

        return listdir

    def _scanner(self, own: Any) -> Any:
        def scandir(path: Any = ".") -> Any:
            folders = self._both(path) if self._is_led(path) else []
            if not folders:
                return own(self._place(path) if self._is_led(path) else path)
            entries = {entry.name: entry for one in reversed(folders) for entry in own(one)}
            found = [one for name, one in entries.items() if not self._is_gone(os.path.join(path, name))]
            return _Entries(found)

        return scandir


class _Entries(Iterator[Any]):
    """Entries of a folder, to be used as what `os.scandir` returns."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
