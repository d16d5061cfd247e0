-- Format 1. Times are microseconds since 1970-01-01T00:00:00Z.

-- One row per session. `card` is the whole index card as JSON, and what readers get; the other columns only serve queries.
create table head (
    id          integer primary key,     -- below 2^31
    tenant      text    not null,
    session     text    not null,
    user        text    not null,
    assistant   text,
    thread      text,
    status      text    not null,
    created_at  integer not null,
    active_at   integer not null,
    due_at      integer,
    seq         integer not null,        -- the last record
    hash        blob    not null,        -- over the visible messages
    parent      text,                    -- the session it leans on
    lease_until integer,
    title       text    not null,        -- folded
    labels      text    not null,        -- a JSON list: tags and plain metadata fields
    card        text    not null
) strict;

create unique index head_key on head (tenant, session);
create index head_user on head (tenant, user, active_at);
create index head_active on head (tenant, active_at);
create index head_hash on head (tenant, hash, user);
create index head_parent on head (tenant, parent) where parent is not null;
create index head_thread on head (tenant, thread) where thread is not null;
create index head_due on head (due_at) where due_at is not null;
create index head_status on head (status) where status <> 'active'; -- to count by
create index head_lease on head (lease_until) where lease_until is not null;

-- The logs. k = head.id << 32 | seq, so that a log is one range of a rowid table: `without rowid` takes twice the disk.
create table record (
    k     integer primary key,
    at    integer not null,
    sum   integer not null,              -- CRC-32 over place, time and text
    entry text    not null               -- JSON, as it was written
) strict;

-- Items on shelves.
create table item (
    id         integer primary key,
    tenant     text    not null,
    owner      text    not null,         -- session/ID, user/NAME, group/NAME or tenant
    shelf      text    not null,
    key        text    not null,
    value      text    not null,
    text       text,
    place      text,                     -- one word that stands for the shelf in item_text, if there is a text
    created_at integer not null,
    used_at    integer not null,
    uses       integer not null,
    expires_at integer
) strict;

create unique index item_key on item (tenant, owner, shelf, key);
create index item_used on item (tenant, owner, shelf, used_at);
create index item_expires on item (expires_at) where expires_at is not null;

-- Full text of the items that have any. With `place` as one more word, a search reads its own shelf only.
create view item_with_text (id, place, text) as select id, place, text from item where text is not null;
create virtual table item_text using fts5(
    place, text, content = 'item_with_text', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2'
);
insert into item_text (item_text, rank) values ('secure-delete', 1);

create trigger item_text_insert after insert on item when new.text is not null begin
    insert into item_text (rowid, place, text) values (new.id, new.place, new.text);
end;
create trigger item_text_delete after delete on item when old.text is not null begin
    insert into item_text (item_text, rowid, place, text) values ('delete', old.id, old.place, old.text);
end;
-- One trigger for both steps: the order of two is not defined.
create trigger item_text_update after update of text on item begin
    insert into item_text (item_text, rowid, place, text)
        select 'delete', old.id, old.place, old.text where old.text is not null;
    insert into item_text (rowid, place, text)
        select new.id, new.place, new.text where new.text is not null;
end;

-- Media, once per tenant, and which session uses them from which record on.
create table blob (
    tenant text not null,
    id     blob not null,                -- BLAKE3 of the bytes
    bytes  blob not null
) strict;

create unique index blob_key on blob (tenant, id);

create table blob_use (
    head_id integer not null,
    seq     integer not null,
    tenant  text    not null,
    id      blob    not null
) strict;

create unique index blob_use_head on blob_use (head_id, id, seq);
create index blob_use_blob on blob_use (tenant, id);

-- What follows is for people: the tables of the documentation, of active and paused sessions, as views on the logs.

-- Which records belong to a session: its own, and those of its ancestors up to where it left them.
create view session_span (tenant, session_id, id, upto) as
    select tenant, session, id, seq from head where parent is null and status in ('active', 'paused')
    union all
    select * from (
        with recursive span (tenant, session_id, id, upto, parent, fork) as (
            select tenant, session, id, seq, parent, card ->> '$.parent.seq'
            from head where parent is not null and status in ('active', 'paused')
            union all
            select span.tenant, span.session_id, up.id, min(span.upto, span.fork), up.parent, up.card ->> '$.parent.seq'
            from span cross join head up on up.tenant = span.tenant and up.session = span.parent
        )
        select tenant, session_id, id, upto from span
    );

-- The messages and checkpoints of a session that no later rewind has cut off, with the number of messages before each.
create view session_log (tenant, session_id, seq, kind, before, k) as
    select tenant, session_id, seq, kind,
        count(*) filter (where kind = 'message') over (
            partition by tenant, session_id order by seq rows between unbounded preceding and 1 preceding
        ),
        k
    from (
        select tenant, session_id, seq, kind, k,
            min(cut) over (
                partition by tenant, session_id order by seq desc rows between unbounded preceding and 1 preceding
            ) as lowest_cut
        from (
            select s.tenant, s.session_id, r.k & 0xffffffff as seq, r.k as k,
                case
                    when r.entry glob '{"message":*' then 'message'
                    when r.entry glob '{"checkpoint":*' then 'checkpoint'
                    when r.entry glob '{"rewound":*' then 'rewound'
                end as kind,
                case when r.entry glob '{"rewound":*' then r.entry ->> '$.rewound.to' end as cut
            from session_span s cross join record r on r.k > s.id << 32 and r.k <= s.id << 32 | s.upto
        )
        where kind is not null
    )
    where kind <> 'rewound' and (lowest_cut is null or lowest_cut >= seq);

create view sessions (session_id, info_json, updated_at, tenant) as
    select session, card -> '$.info', card ->> '$.info.updated_at', tenant
    from head where status in ('active', 'paused');

create view messages (session_id, ord, message_json, tenant) as
    select l.session_id, l.before, r.entry -> '$.message.body', l.tenant
    from session_log l cross join record r on r.k = l.k
    where l.kind = 'message';

create view checkpoints (session_id, label, position, created_at, auto, tenant) as
    select l.session_id, r.entry ->> '$.checkpoint.label', l.before,
        strftime('%Y-%m-%dT%H:%M:%S', r.at / 1000000, 'unixepoch') || printf('.%06dZ', r.at % 1000000),
        coalesce(r.entry ->> '$.checkpoint.auto', 0), l.tenant
    from session_log l cross join record r on r.k = l.k
    where l.kind = 'checkpoint';
