package main

import (
	"context"
	"errors"
	"flag"
	"fmt"

	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// migrateVerb prints the versions of an up or down migration, or the result of validate.
func migrateVerb(flags *flag.FlagSet) func(context.Context, *base) error {
	target := flags.Int("target", 0, "version to end at, or to validate up to (-1: down to nothing)")
	return func(ctx context.Context, base *base) error {
		if len(base.args) != 1 {
			return errors.New("give one of: up, down, validate")
		}
		migrator, err := rivermigrate.New(
			riverpgxv5.New(base.pool), &rivermigrate.Config{Schema: base.schema})
		if err != nil {
			return err
		}
		var direction rivermigrate.Direction
		switch base.args[0] {
		case "validate":
			result, err := migrator.Validate(
				ctx, &rivermigrate.ValidateOpts{TargetVersion: *target})
			if err != nil {
				return err
			}
			return base.out.print(map[string]any{"ok": result.OK, "messages": result.Messages})
		case "up":
			direction = rivermigrate.DirectionUp
		case "down":
			direction = rivermigrate.DirectionDown
		default:
			return fmt.Errorf("no such direction: %q", base.args[0])
		}
		result, err := migrator.Migrate(
			ctx, direction, &rivermigrate.MigrateOpts{TargetVersion: *target})
		if err != nil {
			return err
		}
		for _, version := range result.Versions {
			if err := base.out.print(map[string]any{"version": version.Version}); err != nil {
				return err
			}
		}
		return nil
	}
}
