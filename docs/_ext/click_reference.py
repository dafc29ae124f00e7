"""Directive `click-reference`: writes the reference of a command line from its click commands."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata


class ClickReference(SphinxDirective):
    """One section for each command. The argument is `module:attribute` of the root command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, attribute = self.arguments[0].partition(":")
        root: click.Group = getattr(import_module(module), attribute)
        context = click.Context(root, info_name=root.name)
        return [
            section
            for name in root.list_commands(context)
            for section in self._sections(root, name, context)
        ]

    def _sections(
        self, group: click.Group, name: str, parent: click.Context
    ) -> Iterator[nodes.section]:
        """The section of a command of the group; those of its subcommands are inside."""
        command = group.get_command(parent, name)
        if command is None:
            raise self.error(f"{parent.command_path} has no command {name}")
        context = click.Context(command, info_name=name, parent=parent)
        section = nodes.section(ids=[nodes.make_id(context.command_path)])
        section += nodes.title(text=context.command_path)
        section += nodes.literal_block(text=command.get_help(context), language="text")
        self.state.document.note_implicit_target(section, section)
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                section += list(self._sections(command, child, context))
        yield section


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("click-reference", ClickReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
