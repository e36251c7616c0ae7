"""What programs show to people: a terminal to run them on, and the browser for their pages."""
import fcntl
import os
import pty
import re
import shutil
import struct
import termios
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def on_terminal(command: list[str], cwd: str | Path, columns: int = 100, env: dict[str, str] | None = None,
                stamps: list[tuple[float, str]] | None = None) -> tuple[int, list[str], list[str]]:
    """(exit code, lines that stay, every state of the line that is rewritten) on a terminal. stamps: gets
    (time, text) of whatever comes."""
    own = {name: text for name, text in os.environ.items() if name != "COLUMNS"}    # xdist sets it
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(command[0], command, own | (env or {}))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    out = b""
    while True:
        try:
            new = os.read(terminal, 65536)
        except OSError:     # it has ended
            break
        out += new
        if stamps is not None:
            stamps.append((time.time(), new.decode(errors="replace")))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", out.decode(errors="replace")).replace("\r\n", "\n")
    rows = [row.split("\r") for row in text.split("\n")]
    return code, [row[-1].rstrip() for row in rows], [text for row in rows for text in row[:-1]]
