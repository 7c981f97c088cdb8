// The statement half of the template parser.
#include "scheduler/text/jinja_parser.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/jinja_parser_impl.h"

namespace zipage::jinja {

absl::StatusOr<Body> Parse(const std::vector<Token>& tokens) {
  Parser parser(tokens);
  Body body = parser.ParseTemplate();
  ZIPAGE_RETURN_IF_ERROR(parser.status());
  return body;
}

// The last token, kEof, is never passed.
Token Parser::Take() {
  Token token = Current();
  if (pos_ + 1 < tokens_.size()) ++pos_;
  return token;
}

bool Parser::SkipName(std::string_view name) {
  bool there = Current().IsName(name);
  if (there) Take();
  return there;
}

bool Parser::SkipOperator(std::string_view op) {
  bool there = Current().IsOperator(op);
  if (there) Take();
  return there;
}

void Parser::Expect(Type type, std::string_view value) {
  if (Current().Is(type, value)) {
    Take();
    return;
  }
  Fail(value.empty() ? absl::StrFormat("expected the end of the tag at '%s'", Current().value)
                     : absl::StrFormat("expected '%s' at '%s'", value, Current().value));
}

std::string Parser::TakeName() {
  if (Current().type == Type::kName) return Take().value;
  Fail(absl::StrFormat("expected a name at '%s'", Current().value));
  return "";
}

// Jumps to the end, so that no loop of the parser goes on.
void Parser::Fail(std::string_view message) {
  if (ok()) {
    status_ = absl::InvalidArgumentError(
        absl::StrFormat("chat template, line %d: %s", Current().line, message));
  }
  pos_ = tokens_.size() - 1;
}

void Parser::Unsupported(std::string_view what) {
  if (ok()) {
    status_ = absl::UnimplementedError(
        absl::StrFormat("chat template, line %d: %s is not supported", Current().line, what));
  }
  pos_ = tokens_.size() - 1;
}

Body Parser::ParseTemplate() { return ParseBody({}); }

Body Parser::ParseBody(Names end_tags) {
  Body body;
  if (++block_depth_ > kMaxBlockDepth) Fail("blocks are nested too deeply");
  while (ok() && Current().type != Type::kEof) {
    Token token = Take();
    auto statement = std::make_unique<Stmt>();
    statement->line = token.line;
    if (token.type == Type::kData) {
      statement->kind = Stmt::Kind::kText;
      statement->text = std::move(token.value);
    } else if (token.type == Type::kVariableBegin) {
      statement->kind = Stmt::Kind::kPrint;
      statement->value = ParseTuple(/*with_condition=*/true, /*in_parentheses=*/false);
      Expect(Type::kVariableEnd, "");
    } else {  // kBlockBegin
      for (std::string_view tag : end_tags) {
        if (Current().IsName(tag)) {
          --block_depth_;
          return body;
        }
      }
      statement = ParseStatement();
      if (ok()) Expect(Type::kBlockEnd, "");
    }
    body.push_back(std::move(statement));
  }
  if (ok() && end_tags.size() > 0) {
    Fail(absl::StrFormat("the template ends; missing '%s'", *(end_tags.end() - 1)));
  }
  --block_depth_;
  return body;
}

Body Parser::ParseBlockBody(Names end_tags) {
  SkipOperator(":");
  Expect(Type::kBlockEnd, "");
  return ParseBody(end_tags);
}

std::unique_ptr<Stmt> Parser::ParseStatement() {
  if (Current().type != Type::kName) {
    Fail("expected a tag name");
    return std::make_unique<Stmt>();
  }
  std::string tag = Current().value;
  if (tag == "for") return ParseFor();
  if (tag == "if") return ParseIf();
  if (tag == "set") return ParseSet();
  if (tag == "macro") return ParseMacro();
  if (tag == "filter") return ParseFilterBlock();
  if (tag == "with") return ParseWith();
  if (tag == "generation") return ParseGeneration();
  if (tag == "break") return ParseLoopControl(Stmt::Kind::kBreak);
  if (tag == "continue") return ParseLoopControl(Stmt::Kind::kContinue);
  for (std::string_view known : {"include", "import", "from", "extends", "block", "call",
                                 "autoescape", "print", "do", "trans"}) {
    if (tag == known) Unsupported(absl::StrFormat("tag '%s'", tag));
  }
  Fail(absl::StrFormat("unknown tag '%s'", tag));
  return std::make_unique<Stmt>();
}

namespace {

std::unique_ptr<Stmt> NewStmt(Stmt::Kind kind, int line) {
  auto statement = std::make_unique<Stmt>();
  statement->kind = kind;
  statement->line = line;
  return statement;
}

// Sets a variable for the rest of a function.
template <typename T>
class Restore {
 public:
  Restore(T* variable, T value) : variable_(variable), old_(*variable) { *variable = value; }
  ~Restore() { *variable_ = old_; }

 private:
  T* variable_;
  T old_;
};

}  // namespace

std::unique_ptr<Stmt> Parser::ParseFor() {
  auto statement = NewStmt(Stmt::Kind::kFor, Take().line);
  statement->target = ParseTarget(/*with_namespace=*/false);
  if (!SkipName("in")) Fail("expected 'in'");
  statement->value = ParseTuple(/*with_condition=*/false, /*in_parentheses=*/false);
  if (SkipName("if")) statement->test = ParseExpression();
  if (Current().IsName("recursive")) Unsupported("a recursive loop");
  Restore<bool> scope(&at_top_level_, false);
  {
    Restore<int> loop(&loop_depth_, loop_depth_ + 1);
    statement->body = ParseBlockBody({"else", "endfor"});
  }
  if (SkipName("else")) statement->else_body = ParseBlockBody({"endfor"});
  SkipName("endfor");
  return statement;
}

std::unique_ptr<Stmt> Parser::ParseIf() {
  auto statement = NewStmt(Stmt::Kind::kIf, Take().line);
  do {
    ExprPtr test = ParseTuple(/*with_condition=*/false, /*in_parentheses=*/false);
    Body body = ParseBlockBody({"elif", "else", "endif"});
    statement->branches.emplace_back(std::move(test), std::move(body));
  } while (ok() && SkipName("elif"));
  if (SkipName("else")) statement->else_body = ParseBlockBody({"endif"});
  SkipName("endif");
  return statement;
}

std::unique_ptr<Stmt> Parser::ParseSet() {
  auto statement = NewStmt(Stmt::Kind::kSet, Take().line);
  statement->target = ParseTarget(/*with_namespace=*/true);
  if (SkipOperator("=")) {
    statement->value = ParseTuple(/*with_condition=*/true, /*in_parentheses=*/false);
    return statement;
  }
  statement->kind = Stmt::Kind::kSetBlock;
  if (statement->target->kind == Expr::Kind::kTuple) Fail("a block cannot be set to a tuple");
  ExprBox filters;
  while (ok() && SkipOperator("|")) filters = ParseFilter(std::move(filters));
  statement->value = std::move(filters);
  Restore<bool> scope(&at_top_level_, false);
  statement->body = ParseBlockBody({"endset"});
  SkipName("endset");
  return statement;
}

std::unique_ptr<Stmt> Parser::ParseMacro() {
  auto statement = NewStmt(Stmt::Kind::kMacro, Take().line);
  // A macro sees the scope around it for as long as it lives; only the outermost lives that long.
  if (!at_top_level_) Unsupported("a macro inside a loop, macro or block");
  Macro& macro = statement->macro;
  macro.name = TakeName();
  Expect(Type::kOperator, "(");
  while (ok() && !Current().IsOperator(")")) {
    if (!macro.params.empty()) Expect(Type::kOperator, ",");
    macro.params.push_back(TakeName());
    if (SkipOperator("=")) {
      macro.defaults.push_back(ParseExpression());
    } else if (!macro.defaults.empty()) {
      Fail("a parameter without a default after one with");
    }
  }
  Expect(Type::kOperator, ")");
  Restore<bool> scope(&at_top_level_, false);
  Restore<int> loop(&loop_depth_, 0);
  macro.body = ParseBlockBody({"endmacro"});
  SkipName("endmacro");
  return statement;
}

std::unique_ptr<Stmt> Parser::ParseFilterBlock() {
  auto statement = NewStmt(Stmt::Kind::kFilterBlock, Take().line);
  ExprBox filters = ParseFilter(nullptr);
  while (ok() && SkipOperator("|")) filters = ParseFilter(std::move(filters));
  statement->value = std::move(filters);
  Restore<bool> scope(&at_top_level_, false);
  statement->body = ParseBlockBody({"endfilter"});
  SkipName("endfilter");
  return statement;
}

std::unique_ptr<Stmt> Parser::ParseWith() {
  auto statement = NewStmt(Stmt::Kind::kWith, Take().line);
  while (ok() && Current().type != Type::kBlockEnd) {
    if (!statement->bindings.empty()) Expect(Type::kOperator, ",");
    ExprBox target = New(Expr::Kind::kName, Current().line);
    target->name = TakeName();
    Expect(Type::kOperator, "=");
    statement->bindings.emplace_back(std::move(target), ParseExpression());
  }
  Restore<bool> scope(&at_top_level_, false);
  statement->body = ParseBlockBody({"endwith"});
  SkipName("endwith");
  return statement;
}

// Marks what the model has written; rendered as if it were not there.
std::unique_ptr<Stmt> Parser::ParseGeneration() {
  auto statement = NewStmt(Stmt::Kind::kScope, Take().line);
  Restore<bool> scope(&at_top_level_, false);
  Restore<int> loop(&loop_depth_, 0);
  statement->body = ParseBlockBody({"endgeneration"});
  SkipName("endgeneration");
  return statement;
}

std::unique_ptr<Stmt> Parser::ParseLoopControl(Stmt::Kind kind) {
  auto statement = NewStmt(kind, Current().line);
  if (loop_depth_ == 0) Fail(absl::StrFormat("'%s' outside of a loop", Current().value));
  Take();
  return statement;
}

// Names a value can be bound to: x, or x, y, or (with a namespace) ns.x.
ExprPtr Parser::ParseTarget(bool with_namespace) {
  ExprBox tuple = New(Expr::Kind::kTuple, Current().line);
  bool in_parentheses = SkipOperator("(");
  bool is_tuple = false;
  do {
    if (is_tuple && Current().IsOperator(")")) break;  // a comma at the end
    ExprBox name = New(Expr::Kind::kName, Current().line);
    name->name = TakeName();
    for (std::string_view constant : {"true", "false", "none", "True", "False", "None"}) {
      if (name->name == constant) Fail(absl::StrFormat("cannot assign to '%s'", constant));
    }
    if (with_namespace && SkipOperator(".")) {
      name->kind = Expr::Kind::kNsRef;
      name->ops.push_back(TakeName());
    }
    AddArg(tuple.get(), std::move(name));
    is_tuple = is_tuple || Current().IsOperator(",");
  } while (ok() && SkipOperator(","));
  if (in_parentheses) Expect(Type::kOperator, ")");
  if (is_tuple || tuple->args.size() != 1) return tuple;
  return std::move(tuple->args[0]);
}

}  // namespace zipage::jinja
