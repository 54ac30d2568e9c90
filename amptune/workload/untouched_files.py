"""Keeps files as they are while a script runs to be tuned: what it writes goes to a scratch folder, which it reads.

`torch.save` writes in C++, and safetensors in Rust, so that no audit hook sees them; and another working directory
would break what the script reads. So Python's own functions that write are replaced, for the script's code alone.
"""

from __future__ import annotations

import builtins
import getpass
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
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
_CHANGING = ("remove", "unlink", "rmdir", "truncate", "chmod", "utime")
_MOVING = ("rename", "replace", "link", "symlink")


class UntouchedFiles:
    """Redirects what code writes while `is_script` is true of it; it deletes and renames redirected files alone."""

    def __init__(self, is_script: Callable[[], bool]) -> None:
        self._is_script = is_script
        self._folder = Path(tempfile.mkdtemp(prefix="amptune-script-")).resolve()
        own = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        inductor = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        self._allowed = [Path(one).expanduser().resolve() for one in (*own, *_CACHE_FOLDERS, inductor)]
        self._allowed += [self._folder, Path("/dev"), Path("/proc")]
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        os.environ.update(OFFLINE, MLFLOW_TRACKING_URI=(self._folder / "mlruns").as_uri())
        opened = self._opener(builtins.open)
        for owner in (builtins, io):
            self._replace(owner, "open", opened)
        self._replace(os, "open", self._os_opener(os.open))
        self._replace(torch, "save", self._saver(torch.save, place=1, name="f"))
        for name in _CHANGING:
            self._replace(os, name, self._changer(getattr(os, name), paths=1))
        for name in _MOVING:
            self._replace(os, name, self._changer(getattr(os, name), paths=2))
        self._replace(os, "mkdir", self._maker(os.mkdir))
        self._replace(shutil, "rmtree", self._changer(shutil.rmtree, paths=1))
        for name in ("exists", "isfile", "isdir", "getsize", "getmtime"):
            self._replace(os.path, name, self._reader(getattr(os.path, name)))
        for name in ("stat", "listdir", "scandir"):
            self._replace(os, name, self._reader(getattr(os, name)))
        self._replace(torch, "load", self._reader(torch.load))
        if importlib.util.find_spec("safetensors") is not None:
            import safetensors.torch

            own = safetensors.torch.serialize_file  # which save_file calls, whoever imported that before
            self._replace(safetensors.torch, "serialize_file", self._saver(own, 1, "filename"))
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
        """Returns True for a path that the script itself writes to."""
        if not self._is_script() or not isinstance(path, str | bytes | os.PathLike):
            return False
        absolute = Path(os.path.abspath(os.fsdecode(path)))
        if sys._getframe(2).f_globals.get("__name__") == "tempfile":
            self._allowed.append(absolute)
        return not any(absolute.is_relative_to(one) for one in self._allowed)

    def _scratch(self, path: Any) -> Path:
        absolute = Path(os.path.abspath(os.fsdecode(path)))
        return self._folder / absolute.relative_to(absolute.anchor)

    def _for_writing(self, path: Any, *, keeps: bool) -> Path:
        """Returns the place for what is written, with what stood there if that is `kept`."""
        scratch = self._scratch(path)
        os.makedirs(scratch.parent, exist_ok=True)
        if keeps and not os.path.lexists(scratch) and Path(os.fsdecode(path)).is_file():
            shutil.copyfile(path, scratch)
        return scratch

    def _opener(self, own: Any) -> Any:
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if self._is_led(file):
                if _WRITES & set(mode):
                    file = self._for_writing(file, keeps="w" not in mode)
                elif os.path.lexists(self._scratch(file)):
                    file = self._scratch(file)
            return own(file, mode, *args, **kwargs)

        return open

    def _os_opener(self, own: Any) -> Any:
        def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and kwargs.get("dir_fd") is None and self._is_led(path):
                path = self._for_writing(path, keeps=not flags & os.O_TRUNC)
            return own(path, flags, *args, **kwargs)

        return open

    def _saver(self, own: Any, place: int, name: str) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            given = [*args]
            path = kwargs[name] if name in kwargs else given[place] if len(given) > place else None
            if self._is_led(path):
                scratch = str(self._for_writing(path, keeps=False))
                if name in kwargs:
                    kwargs[name] = scratch
                else:
                    given[place] = scratch
            return own(*given, **kwargs)

        return save

    def _maker(self, own: Any) -> Any:
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None and self._is_led(path):
                if Path(os.fsdecode(path)).is_dir():
                    raise FileExistsError(17, os.strerror(17), path)
                path = self._for_writing(path, keeps=False)
            return own(path, *args, **kwargs)

        return mkdir

    def _changer(self, own: Any, paths: int) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            led = [kwargs.get("dir_fd") is None and self._is_led(one) for one in args[:paths]]
            if not any(led):
                return own(*args, **kwargs)
            places = [self._for_writing(one, keeps=at == 0 and paths > 1) for at, one in enumerate(args[:paths])]
            if not os.path.lexists(places[0]):
                return None  # of what is the user's: it stays
            return own(*map(str, places), *args[paths:], **kwargs)

        return change

    def _reader(self, own: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            if args and self._is_led(args[0]) and os.path.lexists(self._scratch(args[0])):
                args = (str(self._scratch(args[0])), *args[1:])
            return own(*args, **kwargs)

        return read
