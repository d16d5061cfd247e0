//! The page `/docs`: the OpenAPI document as HTML, grouped, with a form for each operation.

use super::examples;
use super::schema::Schemas;
use serde_json::Value;

/// The groups in the order of the page: the tag of their operations, and their heading. Further tags follow.
const GROUPS: [(&str, &str); 15] = [
    ("openai", "Chat and models"),
    ("sessions", "Sessions"),
    ("messages", "Messages"),
    ("checkpoints", "Checkpoints, rewind, fork"),
    ("threads", "Chat threads"),
    ("runs", "Runs and schedules"),
    ("reviews", "Reviews"),
    ("audit", "Audit trail"),
    ("memories", "Memory"),
    ("assistants", "Assistants"),
    ("transfer", "Export and import"),
    ("keys", "API keys"),
    ("users", "Users"),
    ("v1", "Sessions as in mistral.rs"),
    ("operations", "Operations"),
];

/// One operation of the document.
struct Operation<'a> {
    method: &'a str,
    path: &'a str,
    value: &'a Value,
}

impl Operation<'_> {
    fn tag(&self) -> &str {
        self.value["tags"][0].as_str().unwrap_or_default()
    }

    fn text(&self, name: &str) -> &str {
        self.value[name].as_str().unwrap_or_default()
    }
}

/// Renders the page.
pub fn page(document: &Value) -> String {
    let schemas = Schemas::of(document);
    let mut operations: Vec<Operation<'_>> = Vec::new();
    for (path, methods) in document["paths"].as_object().into_iter().flatten() {
        for (method, value) in methods.as_object().into_iter().flatten() {
            operations.push(Operation { method, path, value });
        }
    }
    let mut groups: Vec<(&str, &str)> = GROUPS.to_vec();
    for operation in &operations {
        if !groups.iter().any(|(tag, _)| *tag == operation.tag()) {
            groups.push((operation.tag(), operation.tag()));
        }
    }
    let mut links = String::from("<ul>\n");
    let mut sections = String::new();
    for (tag, heading) in groups {
        let members: Vec<&Operation<'_>> = operations.iter().filter(|o| o.tag() == tag).collect();
        if members.is_empty() {
            continue;
        }
        let (tag, heading) = (escape(tag), escape(heading));
        links.push_str(&format!("<li><a href=\"#group-{tag}\">{heading}</a></li>\n"));
        sections.push_str(&format!("<section id=\"group-{tag}\">\n<h2>{heading}</h2>\n"));
        members.iter().for_each(|operation| sections.push_str(&render(operation, &schemas)));
        sections.push_str("</section>\n");
    }
    links.push_str("</ul>");
    include_str!("page.html").replace("<!-- groups -->", &links).replace("<!-- operations -->", &sections)
}

fn render<'a>(operation: &Operation<'a>, schemas: &Schemas<'a>) -> String {
    let Operation { method, path, value } = operation;
    let id = operation.text("operationId");
    // The most important operation is open.
    let open = if id == "chat" { " open" } else { "" };
    let mut html = format!(
        "<details id=\"{}\"{open}><summary><b class=\"method {method}\">{}</b> <code>{}</code> <span>{}</span></summary>\n",
        escape(id),
        method.to_uppercase(),
        escape(path),
        prose(operation.text("summary")),
    );
    if !operation.text("description").is_empty() {
        html.push_str(&format!("<p>{}</p>\n", prose(operation.text("description"))));
    }
    html.push_str(&parameters(value, schemas));
    html.push_str(&request(operation, schemas));
    html.push_str(&responses(value, schemas));
    html.push_str(&form(operation));
    html.push_str("</details>\n");
    html
}

fn parameters<'a>(operation: &'a Value, schemas: &Schemas<'a>) -> String {
    let row = |p: &'a Value| {
        let text = |name: &str| p[name].as_str().unwrap_or_default();
        let kind = format!("{}, {}", text("in"), schemas.kind(&p["schema"]));
        table_row(text("name"), &kind, p["required"] == true, text("description"))
    };
    let rows: String = operation["parameters"].as_array().into_iter().flatten().map(row).collect();
    if rows.is_empty() { rows } else { format!("<h3>Parameters</h3>\n{}", table("parameter", &rows)) }
}

fn request<'a>(operation: &Operation<'a>, schemas: &Schemas<'a>) -> String {
    let body = &operation.value["requestBody"];
    if !body.is_object() {
        return String::new();
    }
    let note = if body["required"] == false { " (optional)" } else { "" };
    let mut html = format!("<h3>Request body{note}</h3>\n");
    html.push_str(&fields(&body["content"]["application/json"]["schema"], schemas));
    if let Some(example) = examples::request(operation.text("operationId")) {
        let mut command = format!("curl $T{} --json '{example}'", operation.path);
        if operation.method != "post" {
            command = command.replacen("curl", &format!("curl -X {}", operation.method.to_uppercase()), 1);
        }
        html.push_str(&format!("<pre>{}</pre>\n", escape(&command)));
    }
    html
}

fn responses<'a>(operation: &'a Value, schemas: &Schemas<'a>) -> String {
    let mut html = String::new();
    let mut errors = Vec::new();
    for (status, response) in operation["responses"].as_object().into_iter().flatten() {
        let description = response["description"].as_str().unwrap_or_default();
        if !status.starts_with('2') {
            errors.push(format!(
                "<tr><td><code>{}</code></td><td></td><td>{}</td></tr>\n",
                escape(status),
                prose(description)
            ));
            continue;
        }
        html.push_str(&format!("<h3>Response {}</h3>\n<p>{}</p>\n", escape(status), prose(description)));
        let content = response["content"].as_object();
        for (media_type, content) in content.into_iter().flatten() {
            let schema = &content["schema"];
            if media_type != "application/json" {
                html.push_str(&format!("<p>Or as <code>{}</code>.</p>\n", escape(media_type)));
                continue;
            }
            html.push_str(&fields(schema, schemas));
            let example = serde_json::to_string_pretty(&schemas.example(schema, "")).unwrap_or_default();
            if example != "{}" {
                html.push_str(&format!("<pre>{}</pre>\n", escape(&example)));
            }
        }
    }
    if !errors.is_empty() {
        html.push_str("<h3>Errors</h3>\n");
        html.push_str(&format!("<div class=\"scroll\"><table>\n{}</table></div>\n", errors.concat()));
    }
    html
}

fn fields<'a>(schema: &'a Value, schemas: &Schemas<'a>) -> String {
    let row = |f: super::schema::Field| table_row(&f.path, &f.kind, f.required, &f.description);
    let rows: String = schemas.fields(schema).into_iter().map(row).collect();
    if rows.is_empty() { rows } else { table("field", &rows) }
}

fn table(first: &str, rows: &str) -> String {
    format!(
        "<div class=\"scroll\"><table>\n<tr><th>{first}</th><th>type</th><th>description</th></tr>\n{rows}</table></div>\n"
    )
}

fn table_row(name: &str, kind: &str, required: bool, description: &str) -> String {
    let mark = if required { " <span class=\"required\">required</span>" } else { "" };
    format!(
        "<tr><td><code>{}</code>{mark}</td><td>{}</td><td>{}</td></tr>\n",
        escape(name),
        escape(kind),
        prose(description)
    )
}

/// The form that sends a request. It does nothing without the page's script.
fn form(operation: &Operation<'_>) -> String {
    let Operation { method, path, value } = operation;
    let mut html = format!(
        "<form data-method=\"{}\" data-path=\"{}\">\n<h3>Send a request</h3>\n<div class=\"fields\">\n",
        method.to_uppercase(),
        escape(path)
    );
    for p in value["parameters"].as_array().into_iter().flatten() {
        let text = |name: &str| escape(p[name].as_str().unwrap_or_default());
        let required = if p["in"] == "path" { " required" } else { "" };
        html.push_str(&format!(
            "<label>{name} <input name=\"{name}\" data-in=\"{location}\" autocomplete=\"off\"{required}></label>\n",
            name = text("name"),
            location = text("in"),
        ));
    }
    html.push_str("</div>\n");
    if value["requestBody"].is_object() {
        let example = examples::request(operation.text("operationId")).unwrap_or_default();
        html.push_str(&format!(
            "<label>Body <textarea rows=\"{}\" spellcheck=\"false\">\n{}</textarea></label>\n",
            example.lines().count() + 1,
            escape(example)
        ));
    }
    html.push_str(
        "<button type=\"submit\">Send</button> <button type=\"button\" class=\"stop\" disabled>Stop</button>\n",
    );
    html.push_str("<div class=\"result\" role=\"status\" hidden></div>\n</form>\n");
    html
}

/// Escapes text for HTML, also within attributes.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

/// Renders prose: text between backticks is code.
fn prose(text: &str) -> String {
    let mut html = String::new();
    for (i, part) in escape(text).split('`').enumerate() {
        match i % 2 {
            0 => html.push_str(part),
            _ => html.push_str(&format!("<code>{part}</code>")),
        }
    }
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped() {
        assert_eq!(prose("a <b> `c & \"d\"`"), "a &lt;b&gt; <code>c &amp; &quot;d&quot;</code>");
        let document = serde_json::json!({"paths": {"/x": {"get": {"operationId": "a\"b", "summary": "<script>", "tags": ["new"]}}}});
        let html = page(&document);
        assert!(html.contains("id=\"a&quot;b\"") && !html.contains("<script>"), "{html}");
        assert!(html.contains("<h2>new</h2>"), "a group that is not listed");
    }
}
