"""Names and packing of tensors: rules that convert the tensors of one model code to those of another.

`rules` contains the types of a table and finds the rules that match names, `tables` reads it,
`apply` computes the results as views. This room does not depend on files of tensors, dtypes or layouts.
"""

from reshard.names.apply import Applied, AppliedStep, NamedView, apply_rules, is_reversed
from reshard.names.frameworks import Naming, naming_of, plain_names, possible_plain_names, trainer_keys
from reshard.names.operations import SizedOperation, viewed
from reshard.names.rules import HUB_SIDE, NameRules, with_options
from reshard.names.sizes import Configuration, merged
from reshard.names.tables import (
    Edge,
    Path,
    builtin_names,
    config_beside,
    experts_table,
    families_of,
    is_foreign,
    modules_differ,
    name_one_of,
    parse_renames,
    parse_rules,
    path,
    read_config,
    read_rules,
    rules_named,
    table_of_model,
    tables_named,
)
