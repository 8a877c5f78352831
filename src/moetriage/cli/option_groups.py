"""Options that several commands share, as dataclasses whose fields are options.

In: a command with parameters of such types. Out: a command that typer understands, with one parameter per option: typer knows no groups,
and forty parameters repeated in each command would drift apart.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

Command = TypeVar("Command", bound=Callable[..., Any])


def with_groups(command: Command) -> Command:
    """Spread each parameter that is a dataclass into the dataclass's fields, and build it again when the command is called."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += _parameters_of(groups[parameter.name])
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def spread(**values: Any) -> Any:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        return command(**values)

    del spread.__wrapped__  # or typer would look through to the command's own parameters
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread  # type: ignore[return-value]


def _parameters_of(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in dataclasses.fields(kind)
    ]
