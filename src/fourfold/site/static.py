"""The planner's page as a folder that any web server serves: `make site`. The planner runs in the browser, in Pyodide. No torch.

    index.html, planner.js, planner.css, report.js, report.css, choices.json, worker.js      the page
    fourfold.zip                                                                             this package's Python, without tests
    pyodide/                                                                                 Python for browsers, from npm
    NOTICE.txt                                                                               licences of what is in the folder

Pyodide is not part of this repository: `npm pack` gets the version below, whose SHA-512 is checked. Open the folder over http
(`python -m http.server -d FOLDER`): browsers do not start workers from file://. It loads nothing from elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import fourfold
from fourfold.errors import ConfigError, FourfoldError
from fourfold.site.server import page_files

__all__ = ["build_site", "package_zip"]

PYODIDE = "314.0.7"
PYODIDE_SHA512 = (
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
ROOMS = ("model", "planner", "program", "runtime", "shard", "site", "tensor", "view")
"""Parts of the package that planning needs, with what they import; the top level's modules are taken, too."""

NOTICE = f"""This folder holds

fourfold {fourfold.__version__}            Apache License 2.0
Pyodide {PYODIDE}          Mozilla Public License 2.0; its source is at github.com/pyodide/pyodide
CPython (in Pyodide)     Python Software Foundation License
"""


def build_site(folder: Path, archive: Path | None = None) -> None:
    """Write the folder; `archive`: Pyodide's npm package as a file, where it is not to be fetched."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "fourfold.zip").exists():
        raise ConfigError(f"{folder}: is not empty and no site of the planner; name another folder, or remove it")
    pyodide = _pyodide(_fetched() if archive is None else archive.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyodide").mkdir(exist_ok=True)
    for name, data in page_files("pyodide").items():
        (folder / name).write_bytes(data)
    for name, data in pyodide.items():
        (folder / "pyodide" / name).write_bytes(data)
    (folder / "fourfold.zip").write_bytes(package_zip())
    (folder / "NOTICE.txt").write_text(NOTICE)


def package_zip() -> bytes:
    """This package's Python files, as planning needs them; the same bytes for the same sources."""
    root, out = Path(fourfold.__file__).parent, io.BytesIO()
    paths = [*root.glob("*.py"), *(p for room in ROOMS for p in (root / room).rglob("*.py"))]
    paths += [root / "site" / "models.json"]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
        for path in sorted(paths):
            entry = zipfile.ZipInfo(f"fourfold/{path.relative_to(root).as_posix()}", (1980, 1, 1, 0, 0, 0))
            z.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _fetched() -> bytes:
    """Pyodide's npm package."""
    if shutil.which("npm") is None:
        raise ConfigError("npm is missing, which gets Pyodide; install it, or give its package with --pyodide FILE.tgz")
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        found = list(Path(folder).glob("*.tgz"))
        if done.returncode or not found:
            raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:] or 'no file was written'}")
        return found[0].read_bytes()


def _pyodide(archive: bytes) -> dict[str, bytes]:
    """The files that a browser needs, out of the npm package."""
    found = hashlib.sha512(archive).hexdigest()
    if found != PYODIDE_SHA512:
        raise ConfigError(f"the npm package of Pyodide {PYODIDE} has SHA-512 {found[:16]}…, not {PYODIDE_SHA512[:16]}…")
    out = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for name in PYODIDE_FILES:
            member = tar.extractfile(f"package/{name}")
            assert member is not None
            out[name] = member.read()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fourfold.site.static", description="Build the planner's page as a folder."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--pyodide", type=Path, metavar="FILE", help="Pyodide's npm package, if it is not to be fetched"
    )
    args = parser.parse_args()
    try:
        build_site(args.folder, args.pyodide)
    except (FourfoldError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    size = sum(p.stat().st_size for p in args.folder.rglob("*") if p.is_file())
    print(f"{args.folder}: {size / 1e6:.1f} MB; serve it with: python -m http.server -d {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
