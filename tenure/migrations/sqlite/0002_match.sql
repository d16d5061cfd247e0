-- Format 2. What a session is found by besides its whole conversation: its last question and answer, and the tool calls of
-- its last turn. `matches` is the same as in head_match, as hexadecimal text without separators, so that a commit sees at
-- once whether anything has changed.
alter table head add column matches text not null default '';

create table head_match (
    tenant  text    not null,
    key     blob    not null,
    head_id integer not null,
    primary key (tenant, key, head_id)
) strict, without rowid;
