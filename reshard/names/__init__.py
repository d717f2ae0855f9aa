"""Names and packing of tensors: rules that convert the tensors of one model code to those of another.

`rules` contains the types of a table and finds the rules that match names, `tables` reads it,
`apply` computes the results as views. This room does not depend on files of tensors, dtypes or layouts.
"""

from reshard.names.apply import Applied, AppliedStep, NamedView, apply_rules, is_reversed
from reshard.names.frameworks import (
    megatron_name_before,
    megatron_names,
    name_before,
    plain_names,
    possible_plain_names,
    trainer_keys,
    trainer_names,
)
from reshard.names.operations import SizedOperation, viewed
from reshard.names.rules import HUB_SIDE, NameRules, possible_options, with_options
from reshard.names.sizes import Configuration, merged
from reshard.names.tables import (
    MEGATRON,
    builtin_names,
    chained_rules,
    config_beside,
    experts_table,
    is_foreign,
    megatron_families,
    modules_differ,
    parse_renames,
    parse_rules,
    read_config,
    read_rules,
    rules_named,
)
