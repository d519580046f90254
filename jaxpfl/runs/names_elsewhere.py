"""Names that other packages use for settings; if a user types one of them, the error suggests this package's name."""

from __future__ import annotations

from collections.abc import Collection

from jaxpfl.support.errors import JaxpflError, shown, unknown_name

_NAMES_ELSEWHERE = {
    "data": "dataset data_set dataset_name data_name",
    "data_dir": "data_path data_root data_folder dataset_dir dataset_path root",
    "partition": "partitioner partition_method split_type distribution niid",
    "alpha": "dirichlet_alpha partition_alpha dir_alpha beta",
    "clients": "num_clients n_clients num_users total_clients client_num_in_total num_supernodes num_partitions",
    "classes_per_client": "num_classes_per_client class_per_client",
    "unseen_clients": "new_clients num_new_clients",
    "model": "model_name arch architecture net network",
    "rounds": "num_rounds n_rounds global_rounds num_server_rounds comm_round comm_rounds communication_rounds",
    "cohort": "clients_per_round num_clients_per_round client_num_per_round join_ratio fraction_fit fraction_train "
    "client_fraction frac sample_rate participation_rate",
    "local_steps": "steps num_steps num_local_steps iterations local_iterations",
    "local_epochs": "epochs epoch num_epochs n_epochs num_local_epochs client_epochs local_ep",
    "batch_size": "batch bs train_batch_size local_batch_size client_batch_size",
    "client_optimizer": "optimizer optim opt local_optimizer",
    "lr": "learning_rate local_learning_rate client_learning_rate client_lr local_lr step_size eta",
    "server_lr": "server_learning_rate global_learning_rate global_lr",
    "seed": "random_seed random_state manual_seed",
    "seeds": "num_seeds num_runs times repeats trials",
    "eval_every": "eval_gap eval_interval eval_freq test_every",
    "checkpoint_every": "save_every save_gap save_interval",
    "patience": "early_stop early_stopping",
    "compress": "compression compressor",
    "dropout": "drop_rate client_drop_rate client_dropout",
    "privacy.clipping_norm": "clip clip_norm l2_norm_clip max_grad_norm",
    "plan.devices": "device device_id num_devices gpu gpus num_gpus cuda",
    "output": "output_dir out_dir save_dir save_folder results_dir log_dir logdir",
    "resume": "restore resume_from",
}
NAMES_ELSEWHERE = {other: name for name, others in _NAMES_ELSEWHERE.items() for other in others.split()}
"""Names of settings in Flower, PFLlib, FedML, FedJAX and papers -> the setting of this package that errors suggest."""
NAME_NOTES = {
    "cohort": "a number of clients",
    "client_optimizer": "the server has --server-optimizer",
    "plan.devices": "auto uses all GPUs that JAX finds",
}
"""Additional notes for users of other packages' names, by the setting of this package."""


def unknown_setting(kind: str, name: str, fields: Collection[str]) -> JaxpflError:
    """Return the error for an unknown setting.

    If the name is another package's name for one of the settings, the error suggests that setting.

    Args:
      kind: kind of the valid names, for the message, such as "field in run.toml".
      name: unknown name.
      fields: names of the valid settings.
    """
    meant = NAMES_ELSEWHERE.get(name.replace("-", "_"), "")
    if meant.partition(".")[0] in fields:
        return JaxpflError(f"unknown {kind} {shown(name)}: did you mean {meant!r}?")
    return unknown_name(kind, name, fields)
