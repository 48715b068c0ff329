package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// tree is what our packages declare: per directory, names and the methods and fields of types.
type tree map[string]map[string]map[string]bool

// parseTree reads every Go file of the module but the tests.
func parseTree(t *testing.T) tree {
	t.Helper()
	out := tree{}
	files := token.NewFileSet()
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		name := e.Name()
		switch {
		case err != nil:
			return err
		case e.IsDir() && path != root && (name == "testdata" || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_")):
			return filepath.SkipDir
		case e.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		out.add(filepath.ToSlash(dir), f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (c tree) add(dir string, f *ast.File) {
	names := c[dir]
	if names == nil {
		names = map[string]map[string]bool{}
		c[dir] = names
	}
	member := func(name, inside string) {
		if names[name] == nil {
			names[name] = map[string]bool{}
		}
		if inside != "" {
			names[name][inside] = true
		}
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				member(d.Name.Name, "")
			} else if r := receiver(d.Recv.List[0].Type); r != "" {
				member(r, d.Name.Name)
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					member(s.Name.Name, "")
					for _, name := range inside(s.Type) {
						member(s.Name.Name, name)
					}
				case *ast.ValueSpec:
					for _, n := range s.Names {
						member(n.Name, "")
					}
				}
			}
		}
	}
}

// receiver is the name of a method's type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// inside are a struct's fields or an interface's methods.
func inside(e ast.Expr) (out []string) {
	var list *ast.FieldList
	switch e := e.(type) {
	case *ast.StructType:
		list = e.Fields
	case *ast.InterfaceType:
		list = e.Methods
	default:
		return nil
	}
	for _, f := range list.List {
		for _, n := range f.Names {
			out = append(out, n.Name)
		}
	}
	return out
}

// dirs are the directories that a package name, or the end of an import path, may mean.
func (c tree) dirs(pkg string) (out []string) {
	for dir := range c {
		if dir == pkg || strings.HasSuffix(dir, "/"+pkg) {
			out = append(out, dir)
		}
	}
	return out
}

func (c tree) known(pkg string) bool { return len(c.dirs(pkg)) > 0 }

// has reports whether a package declares name, and name the member if there is one.
func (c tree) has(pkg, name, member string) bool {
	for _, dir := range c.dirs(pkg) {
		if inside, ok := c[dir][name]; ok && (member == "" || inside[member]) {
			return true
		}
	}
	return false
}
