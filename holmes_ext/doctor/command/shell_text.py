"""Reads a shell script, or the text of `bash -c "..."`, as far as that is needed to find a training command.

The text is split into simple commands (at `;`, `&&`, `|`, line ends ...), quotes are removed, and variables
that the text itself assigns, or that are in the environment, are replaced by their values. Nothing is run:
words with other variables, or with $(...), stay as they are. So do variables that are assigned in a branch
or a loop, since it is not known which branch runs.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

#: Characters that end a simple command.
_SEPARATORS = ";&|\n()"
_BLANKS = " \t\r"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
#: $NAME, ${NAME}, or ${NAME:-DEFAULT}, whose default may have a variable itself.
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*|[0-9])|"
    r"\{([A-Za-z_]\w*|[0-9])(?::?[-=]((?:[^{}]|\$\{[^{}]*\})*))?\})"
)
#: All items of an array: ${ARGS[@]} or ${ARGS[*]}; of the script's arguments: $@ or $*.
_ALL_ITEMS = re.compile(r"\$(?:\{(\w+)\[[@*]\]\}|\{?[@*]\}?)")
#: Array of the arguments of a script.
_ARGUMENTS = "@"
#: Begin of an array, up to its parenthesis: ARGS=( or ARGS+=(
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.DOTALL)
_NAME_IN_ARITHMETIC = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
#: Lines of text that a command reads: cat > FILE <<EOF ... EOF
_HERE_DOCUMENT = re.compile(
    r"(?<!<)<<-?(?!<)[ \t]*(['\"]?)(\w+)\1([^\n]*)\n((?:[^\n]*\n)*?)[ \t]*\2[ \t]*$", re.MULTILINE
)
#: Program at the beginning of a command that runs such lines as a script -> its option for a text.
_OPTION_FOR_TEXT = {"sbatch": "--wrap", "bash": "-c", "sh": "-c"}
_RUNS_LINES = re.compile(r"(?:^|[;&|])\s*(?:exec\s+)?(?:\S*/)?(sbatch|bash|sh)(?=\s|$)")
#: Words before a command that do not change which program it starts.
_KEYWORDS = (
    "exec",
    "time",
    "then",
    "do",
    "else",
    "elif",
    "{",
    "!",
    "if",
    "while",
    "until",
    "command",
)
#: First words of a part of a script that may run or not, or several times, and of its end.
_BRANCH_BEGINS = ("if", "case", "for", "while", "until", "select")
_BRANCH_ENDS = ("fi", "esac", "done")
#: First words of a condition: [ -n "$NODES" ] && NODES=2
_CONDITIONS = ("[", "[[", "test")
#: Words before assignments.
_DECLARATIONS = ("export", "readonly", "declare", "local")
#: Begin of a word that only a running shell can replace: $NAME, ${NAME}, $(...), $1 or `...`.
_UNKNOWN = re.compile(r"\$[\w{(@*#]|`")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def has_variable(word: str) -> bool:
    """Return whether a word has text that a running shell would replace: $NAME, $(COMMAND) or `COMMAND`.

    simple_commands() replaces such text by its value if the value is known without running the shell. So
    its words have such text only for other values, such as that of $SLURM_PROCID.
    """
    return bool(_UNKNOWN.search(word))


def batch_options(text: str) -> list[str]:
    """Return the words of the #SBATCH lines of a script for Slurm.

    As in sbatch, they count up to the first command of the script, and a "#" after an option begins a
    comment.

    Args:
        text: The script.
    """
    words = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            try:
                words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:  # a quote that is not closed
                continue
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def simple_commands(
    text: str, environ: Mapping[str, str], arguments: tuple[str, ...] | None = None
) -> list[list[str]]:
    """Return the words of each simple command in the text of a shell script.

    Redirections and comments are left out. Assignments (A=B, export A=B) give no command, but values of
    variables in the commands after them.

    Args:
        text: The text, such as "cd /work && torchrun train.py --lr $LR > log 2>&1".
        environ: Environment variables, for variables that the text does not assign.
        arguments: Arguments of the script: $1, $2, ...; None if they are not known.
    """
    variables = dict(environ)
    arrays: dict[str, list[str]] = {}
    if arguments is not None:
        arrays[_ARGUMENTS] = list(arguments)
        variables |= {str(number): word for number, word in enumerate(arguments[:9], 1)}
    text = _HERE_DOCUMENT.sub(_without_here_document, text.replace("\\\n", " "))
    reader = _Reader(text, variables, arrays)
    commands = []
    branch_depth = 0  # number of branches and loops around the command
    for words in reader.commands():
        if not words:  # between the two characters of "&&", for example
            continue
        branch_depth += _change_of_depth(words)
        # The reader splits the text while this loop runs. Until here, its attribute is about `words`; from
        # here on, about the next command, which it reads in the next iteration.
        may_not_run = reader.may_not_run
        reader.may_not_run = branch_depth > 0 or words[0] in _CONDITIONS
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        if words and words[0] in _DECLARATIONS:
            assignments = [_ASSIGNMENT.fullmatch(word) for word in words[1:]]
        else:
            assignments = [_ASSIGNMENT.fullmatch(word) for word in words]
        if words and (words[0] in _DECLARATIONS or all(assignments)):
            for match in filter(None, assignments):
                reader.assign(match, may_not_run)
        elif words:
            commands.append(words)
    return commands


def _without_here_document(match: re.Match[str]) -> str:
    """Return the replacement of lines of text that a command reads (<<EOF ... EOF).

    If sbatch or a shell reads them, they become its argument: `sbatch <<EOF` becomes `sbatch --wrap "..."`.
    In the lines, variables are replaced unless the word after << is quoted. Other lines are left out.

    Args:
        match: Match of _HERE_DOCUMENT.
    """
    quote, _, after, lines = match.groups()
    line_begin = match.string.rfind("\n", 0, match.start()) + 1
    program = _RUNS_LINES.search(match.string[line_begin : match.start()])
    if program is None:
        return f"{after}\n"
    option = _OPTION_FOR_TEXT[program[1]]
    if quote:
        escaped = lines.replace("'", "'\\''")
        return f" {option} '{escaped}'{after}\n"
    escaped = lines.replace('"', '\\"')
    return f' {option} "{escaped}"{after}\n'


def _change_of_depth(words: list[str]) -> int:
    """Return 1 if a command begins a branch or a loop (if, for ...), -1 if it ends one (fi, done), else 0."""
    while words and words[0] in ("then", "do", "else", "{"):
        words = words[1:]
    if words and words[0] in _BRANCH_BEGINS:
        return 1
    return -1 if words and words[0] in _BRANCH_ENDS else 0


def _value_of_arithmetic(text: str, variables: Mapping[str, str]) -> str:
    """Evaluate the text between $(( and )) of a shell script.

    "" if it contains anything but whole numbers, variables with such values, parentheses, and the
    operators + - * / %.

    Args:
        text: The text, such as "NODES * $GPUS".
        variables: Values of the variables.
    """
    replaced = _NAME_IN_ARITHMETIC.sub(lambda match: variables.get(match[1], "?"), text)
    try:
        tree = ast.parse(replaced.replace("/", "//").strip(), mode="eval")
        return str(_number_of_node(tree.body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return ""


def _number_of_node(node: ast.expr) -> int:
    """Evaluate an arithmetic expression of whole numbers, given as a syntax tree.

    Raises:
        ValueError: The expression contains anything but whole numbers and _OPERATORS, or an operand is
            negative. Python rounds the quotient of a negative number down, a shell rounds it towards 0.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _number_of_node(node.left)
        right = _number_of_node(node.right)
        if min(left, right) < 0:
            raise ValueError("a shell rounds the quotients of negative numbers otherwise")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("no arithmetic of whole numbers")


@dataclass
class _Reader:
    """Splits a text into words, character by character, with the rules of a POSIX shell."""

    text: str
    variables: dict[str, str]  # read while the text is split, so that assignments before count
    arrays: dict[str, list[str]]  # name -> its items
    unknown: set[str] = field(default_factory=set)  # variables that a branch or a loop assigns
    may_not_run: bool = (
        False  # whether the next command is in a branch or loop, or after a condition
    )
    position: int = 0
    word: str = ""  # that is being read
    has_word: bool = False  # also true for an empty word, ""
    has_empty_list: bool = False  # whether an array without items was in the quotes
    words: list[str] = field(default_factory=list)

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each simple command in the shell text.

        A list is empty where the text has no command, such as between the two characters of "&&".
        """
        while self.position < len(self.text):
            character = self.text[self.position]
            array = _ARRAY.fullmatch(self.word) if character == "(" else None
            if array is not None:
                self._read_array(array[1], is_appended=bool(array[2]))
            elif character in _SEPARATORS and not self.text.startswith("&>", self.position):
                self._end_word()
                yield self._pop_words()
                self.position += 1
            else:
                self._read_character(character)
        self._end_word()
        yield self._pop_words()

    def assign(self, match: re.Match[str], may_not_run: bool) -> None:
        """Carry out an assignment to a shell variable, A=B or A+=B.

        Args:
            match: Match of _ASSIGNMENT.
            may_not_run: Whether the assignment is in a branch or loop. The value is then not known.
        """
        name, plus, value = match.groups()
        if may_not_run:
            self.variables.pop(name, None)
            self.unknown.add(name)
        elif not plus:
            self.variables[name] = value
            self.unknown.discard(name)
        elif name in self.variables:
            self.variables[name] += value

    def _read_character(self, character: str) -> None:
        """Read the part of the text that begins at the current position, and move behind it.

        It is a text in quotes, a variable, a redirection, a comment or a blank. Any other character is
        added to the current word.

        Args:
            character: The character at the current position.
        """
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
        else:
            self._add(character)
            self.position += 1

    def _read_array(self, name: str, is_appended: bool) -> None:
        """Read the items of an array up to its closing parenthesis.

        Args:
            name: Name of the array.
            is_appended: Whether the items follow those that the array has: NAME+=(...).
        """
        self.word = ""
        self.has_word = False
        outer_words = self._pop_words()
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] != ")":
            character = " " if self.text[self.position] == "\n" else self.text[self.position]
            self._read_character(character)
        self.position += 1
        self._end_word()
        items = self._pop_words()
        self.words = outer_words
        if self.may_not_run:  # the new items of the array are not known
            self.arrays.pop(name, None)
        elif not is_appended:
            self.arrays[name] = items
        elif name in self.arrays:
            self.arrays[name] += items

    def _add(self, text: str) -> None:
        self.word += text
        self.has_word = True

    def _end_word(self) -> None:
        if self.has_word:
            self.words.append(self.word)
        self.word = ""
        self.has_word = False

    def _pop_words(self) -> list[str]:
        """Return the words of the simple command (or array) that was read, and begin a new list of words."""
        words = self.words
        self.words = []
        return words

    def _read_quoted(self, quote: str) -> None:
        """Read up to the closing quote. Only double quotes replace variables and know a backslash."""
        had_word = self.has_word
        self.has_empty_list = False
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
        if (
            self.has_empty_list and not self.word
        ):  # "$@" without arguments is no word, not even an empty word
            self.has_word = had_word

    def _read_expansion(self, is_quoted: bool) -> None:
        """Read $NAME, ${ARRAY[@]}, $((ARITHMETIC)) or $(COMMAND), and add its value to the current word.

        Each item of an array becomes a word. $@ is the array of the script's arguments. If the value is
        not known, the text itself is added. That of a command ($(...) or `...`) never is known.

        Args:
            is_quoted: Whether the variable stands between double quotes. If not, blanks in its value end
                the current word.
        """
        items = _ALL_ITEMS.match(self.text, self.position)
        # Group 1 is the name of the array. The script's arguments, $@, have none.
        if items is not None and (items[1] or _ARGUMENTS) in self.arrays:
            self.position = items.end()
            self._add_items(self.arrays[items[1] or _ARGUMENTS])
            return
        arithmetic = _ARITHMETIC.match(self.text, self.position)
        result = _value_of_arithmetic(arithmetic[1], self.variables) if arithmetic else ""
        if arithmetic is not None and result:
            self.position = arithmetic.end()
            self._add(result)
            return
        match = _VARIABLE.match(self.text, self.position)
        if match is None:
            end = self._end_of_command()
            self._add(self.text[self.position : end])
            self.position = end
            return
        self.position = match.end()
        value = self._value_of(match)
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

    def _value_of(self, match: re.Match[str]) -> str | None:
        """Return the value of a variable, or its default in ${NAME:-DEFAULT}; None if it is not known.

        Args:
            match: Match of _VARIABLE.
        """
        name = match[1] or match[2]
        if name in self.unknown:
            return None
        if self.variables.get(name):
            return self.variables[name]
        if self.arrays.get(name):
            return self.arrays[name][0]  # $ARGS of an array is its first item
        if match[3] is None:
            return self.variables.get(name)
        return _VARIABLE.sub(lambda inner: self._value_of(inner) or inner[0], match[3])

    def _add_items(self, items: list[str]) -> None:
        """Add the items of an array as words: the first belongs to the current word, as in a shell."""
        self.has_empty_list = not items
        for number, item in enumerate(items):
            if number > 0:
                self._end_word()
            self._add(item)

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
