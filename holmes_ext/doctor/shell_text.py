"""Reads the text of `bash -c "..."` as a shell would, as far as that is needed to find a training command.

The text is split into simple commands (at `;`, `&&`, `|`, line ends ...), quotes are removed, and variables
that the text itself assigns, or that are in the environment, are replaced by their values. Nothing is run:
words with other variables, or with $(...), stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

#: Characters that end a simple command.
_SEPARATORS = ";&|\n()"
_BLANKS = " \t\r"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^{}$]*))?\})")
#: Words before a command that do not change which program it starts.
_KEYWORDS = ("exec", "time", "then", "do", "else", "{", "!", "if", "while", "command")
#: Begin of a word that only a running shell can replace: $NAME, ${NAME}, $(...), $1 or `...`.
_UNKNOWN = re.compile(r"\$[\w{(@*#]|`")


def has_variable(word: str) -> bool:
    """Return whether a word has a variable, or a command in $(...), that only a shell replaces."""
    return bool(_UNKNOWN.search(word))


def simple_commands(text: str, environ: Mapping[str, str]) -> list[list[str]]:
    """Return the words of each simple command in the text of a shell script.

    Redirections and comments are left out. Assignments (A=B, export A=B) give no command, but values of
    variables in the commands after them.

    Args:
        text: The text, such as "cd /work && torchrun train.py --lr $LR > log 2>&1".
        environ: Environment variables, for variables that the text does not assign.
    """
    variables = dict(environ)
    commands = []
    for words in _Reader(text.replace("\\\n", " "), variables).commands():
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        if words and words[0] == "export":
            assignments = [_ASSIGNMENT.fullmatch(word) for word in words[1:]]
        else:
            assignments = [_ASSIGNMENT.fullmatch(word) for word in words]
        if words and (words[0] == "export" or all(assignments)):
            for match in filter(None, assignments):
                variables[match[1]] = match[2]
        elif words:
            commands.append(words)
    return commands


@dataclass
class _Reader:
    """Splits a text into words, character by character, with the rules of a POSIX shell."""

    text: str
    variables: Mapping[str, str]  # read while the text is split, so that assignments before count
    position: int = 0
    word: str = ""  # that is being read
    has_word: bool = False  # also true for an empty word, ""
    words: list[str] = field(default_factory=list)

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each simple command.

        A list is empty where the text has no command, such as between the two characters of "&&".
        """
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in "'\"":
                self._read_quoted(character)
            elif character == "\\":
                self._add(self.text[self.position + 1 : self.position + 2])
                self.position += 2
            elif character in "<>" or self.text.startswith("&>", self.position):
                self._skip_redirection()
            elif character == "$" or character == "`":
                self._read_expansion(is_quoted=False)
            elif character == "#" and not self.has_word:
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            elif character in _BLANKS:
                self._end_word()
                self.position += 1
            elif character in _SEPARATORS:
                self._end_word()
                yield self._pop_words()
                self.position += 1
            else:
                self._add(character)
                self.position += 1
        self._end_word()
        yield self._pop_words()

    def _add(self, text: str) -> None:
        self.word += text
        self.has_word = True

    def _end_word(self) -> None:
        if self.has_word:
            self.words.append(self.word)
        self.word = ""
        self.has_word = False

    def _pop_words(self) -> list[str]:
        """Return the words since the last separator, and begin the next command without words."""
        words = self.words
        self.words = []
        return words

    def _read_quoted(self, quote: str) -> None:
        """Read up to the closing quote. Only double quotes replace variables and know a backslash."""
        self._add("")
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] != quote:
            character = self.text[self.position]
            if quote == '"' and character in "$`":
                self._read_expansion(is_quoted=True)
                continue
            if quote == '"' and character == "\\" and self.text[self.position + 1 :][:1] in '"\\$`':
                self.position += 1
                character = self.text[self.position]
            self._add(character)
            self.position += 1
        self.position += 1

    def _read_expansion(self, is_quoted: bool) -> None:
        """Read a variable, and add its value to the current word.

        A variable without a value, or a command in $(...) or `...`, is added as it is.

        Args:
            is_quoted: Whether the variable stands between double quotes. If not, blanks in its value end
                the current word.
        """
        match = _VARIABLE.match(self.text, self.position)
        if match is None:
            end = self._end_of_command()
            self._add(self.text[self.position : end])
            self.position = end
            return
        self.position = match.end()
        value = self.variables.get(match[1] or match[2], match[3])
        if value is None:
            self._add(match[0])  # without a value here
        elif is_quoted:
            self._add(value)
        else:
            for number, part in enumerate(re.split(r"\s+", value)):
                if number > 0:  # blanks stood before this part
                    self._end_word()
                if part:
                    self._add(part)

    def _end_of_command(self) -> int:
        """Return the position after $(...) or `...`, or after a lone $."""
        if self.text[self.position] == "`":
            end = self.text.find("`", self.position + 1)
            return len(self.text) if end < 0 else end + 1
        if not self.text.startswith("$(", self.position):
            return self.position + 1
        depth = 0
        for position in range(self.position, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[position], 0)
            if depth == 0 and self.text[position] == ")":
                return position + 1
        return len(self.text)

    def _skip_redirection(self) -> None:
        """Skip a redirection such as > FILE, 2>&1 or <<< TEXT, with the digit before it."""
        if not self.word.isdecimal():
            self._end_word()
        self.word = ""
        self.has_word = False
        while self.position < len(self.text) and self.text[self.position] in "<>&|":
            self.position += 1
        while self.position < len(self.text) and self.text[self.position] in _BLANKS:
            self.position += 1
        # The target is read as a word of its own, and dropped.
        target_ends = _BLANKS + _SEPARATORS + "<>"
        while self.position < len(self.text) and self.text[self.position] not in target_ends:
            self.position += 1
