"""Limits on sizes: kernel files 300 lines (GEMM 500), other files 400, tests 600; functions 60 lines."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path


def limit(path: Path) -> int:
    """Lines allowed in a file."""
    if path.parts[0] == "tests":
        return 600
    if "kernels" in path.parts:
        return 500 if "gemm" in path.stem else 300
    return 400


def complaints(path: Path) -> list[str]:
    """What is too long in a file."""
    source = path.read_text()
    found = []
    if (lines := len(source.splitlines())) > limit(path):
        found.append(f"{path}: {lines} lines, limit {limit(path)}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > 60 and path.parts[0] != "tests":
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, limit 60")
    return found


def main() -> None:
    """Prints every file or function that is too long; exit status 1 if there is one."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    found = [complaint for name in listed if Path(name).exists() for complaint in complaints(Path(name))]
    print("\n".join(found) or "sizes: all within limits")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
